// Computes in a page without a server: Python in WebAssembly, in a worker, so that the page stays responsive.
let ready;

async function start({ pyodide, archive }) {
  const { loadPyodide } = await import(pyodide + "pyodide.mjs");
  const python = await loadPyodide({ indexURL: pyodide });
  python.unpackArchive(archive, "zip", { extractDir: "/lib/pipemem" });
  python.runPython("import sys; sys.path.insert(0, '/lib/pipemem')");
  return python.pyimport("megatron_pipemem.tools.explore.answers").explore_json;
}

onmessage = async ({ data }) => {
  try {
    if (data.archive) ready = start(data);
    postMessage({ text: (await ready)(data.query) });
  } catch (error) {
    postMessage({ error: String(error.message || error).trim().split("\n").pop() });
  }
};
