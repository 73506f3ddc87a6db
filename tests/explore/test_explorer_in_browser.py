"""The explorer in a real browser: what a user moves, presses, saves and shares."""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commands import pipemem
from lanes import nightly

from megatron_pipemem.tools.cli.explore import schedule_groups
from megatron_pipemem.tools.explore.answers import explore_data
from megatron_pipemem.tools.explore.serving import PYODIDE_VERSION, explorer_page, export

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = nightly("tests/explore/test_answers.py, test_serving.py")


class Explorer:
    """The page as its user meets it."""

    def __init__(self, driver, url: str) -> None:
        self.driver = driver
        driver.get("about:blank")  # a page that differs in its fragment only is not loaded again
        driver.get(url)
        self.settle()

    def settle(self) -> None:
        self.driver.execute_async_script("pipemem.updated.then(() => requestAnimationFrame(arguments[0]))")

    def script(self, code: str, *arguments: object):
        return self.driver.execute_script(code, *arguments)

    def field(self, name: str):
        return self.driver.find_element(By.NAME, name)

    def slider(self, name: str):
        return self.driver.find_element(By.CSS_SELECTOR, f"input[type=range]:has(+ [name={name}])")

    def press(self, element, *keys: str) -> None:
        element.send_keys(*keys)
        self.settle()

    def cards(self) -> list[str]:
        return self.script("return [...document.querySelectorAll('.card')].map(card => card.innerText)")

    def commands(self) -> list[str]:
        return self.script("return [...document.querySelectorAll('.card code')].map(code => code.innerText)")

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def opened(browser, server):
    pages = []

    def open_page(fragment: str = "") -> Explorer:
        pages.append(Explorer(browser, f"{server.url}#{fragment}"))
        return pages[-1]

    yield open_page
    assert [page.errors() for page in pages] == [[]] * len(pages)


def test_sliders_fields_and_lists_change_pictures_and_numbers(opened):
    """All by keyboard."""
    page = opened()
    assert page.commands() == ["pipemem simulate 1f1b -p 8 -m 32", "pipemem simulate v-half -p 8 -m 32"]
    page.press(page.slider("p"), Keys.ARROW_LEFT)
    page.press(page.slider("m"), Keys.HOME, *[Keys.ARROW_RIGHT] * 13)
    page.press(page.field("f"), Keys.CONTROL, "a", Keys.NULL, "0.5")
    page.press(page.field("b"), "zbv", Keys.ENTER)
    page.press(page.slider("c"), *[Keys.ARROW_RIGHT] * 5)
    arguments = "-p 7 -m 14 --costs 0.5,1,1 --p2p 0.1"
    assert page.commands() == [f"pipemem simulate {name} {arguments}" for name in ("1f1b", "zbv")]
    _, told = explore_data({"b": "zbv", "p": "7", "m": "14", "f": ".5", "c": ".1"})["facts"]
    assert f"{100 * told['bubble']:.1f} %" in page.cards()[1]
    assert page.script("return runs.map(run => run.rows.length)") == [7, 7]
    assert page.script("return runs[1].makespan") == pytest.approx(told["makespan"])


def test_the_address_holds_all_choices(opened):
    page = opened("a=interleaved&v=4&p=4&m=8&cap=1.5&side")
    before = page.commands()
    assert before[0] == "pipemem simulate interleaved -p 4 -m 8 --chunks 4 --memory-cap 1.5"
    left, right = page.script("return runs.map(run => run.canvas.getBoundingClientRect())")
    assert left["top"] == right["top"] and left["right"] < right["left"]
    page.press(page.slider("w"), Keys.ARROW_RIGHT)
    changed, address = page.commands(), page.script("return address()")
    assert changed == [line.replace(" --memory-cap", " --costs 1,1,1.1 --memory-cap") for line in before]
    again = opened(address)
    assert again.commands() == changed and again.field("side").is_selected()
    again.driver.find_element(By.CSS_SELECTOR, "[type=reset]").click()
    again.settle()
    assert again.script("return address()") == ""


def test_errors_stand_on_the_page(opened):
    page = opened("a=nope&m=many")
    (card,) = page.cards()
    assert "'many'" in card and "[bad-number]" in card and page.script("return runs.length") == 0
    page.press(page.field("m"), Keys.CONTROL, "a", Keys.NULL, "4")
    wrong, right = page.cards()
    assert "[unknown-schedule]" in wrong and "pipemem simulate v-half -p 8 -m 4" in right


def test_above_the_cap_the_last_picture_stays_pale_and_auto_is_offered(opened):
    page = opened("p=4&m=6")
    stale = "return [...document.querySelectorAll('#runs section')].map(each => each.classList.contains('stale'))"
    assert page.script(stale) == [False, False]
    page.press(page.field("cap"), "0.8")
    assert "[over-cap]" in page.cards()[0] and page.script(stale) == [True, False]
    page.press(page.field("cap"), Keys.CONTROL, "a", Keys.NULL, "0.5")
    assert page.script(stale) == [True, True] and page.script("return runs.map(run => run.name)") == ["1f1b", "v-half"]
    page.press(page.field("m"), Keys.CONTROL, "a", Keys.NULL, "x")
    assert len(page.cards()) == 1 and page.script(stale) == [True, True]
    page.press(page.field("m"), Keys.CONTROL, "a", Keys.NULL, "6")
    page.driver.find_element(By.XPATH, "//button[text()='Take auto']").click()
    page.settle()
    assert page.script(stale) == [False, True] and "--memory-cap 0.5" in page.commands()[0]
    assert page.script("return runs[0].name") == "auto"


def test_without_pyodide_the_page_says_what_to_do(browser, tmp_path):
    (tmp_path / "index.html").write_text(
        explorer_page(schedule_groups(), "missing/", home="home.html"), encoding="utf-8"
    )
    (tmp_path / "home.html").write_text('<link rel="icon" href="data:,">', encoding="utf-8")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        page = Explorer(browser, f"http://127.0.0.1:{site.server_port}/")
        (card,) = page.cards()
        assert "pipemem explore" in card and page.script("return runs.length") == 2
        assert page.script("return document.querySelectorAll('#runs .stale').length") == 2
        page.driver.find_element(By.CSS_SELECTOR, "header a").click()
        assert page.driver.current_url.endswith("/home.html")
        page.errors()  # of the missing files
        site.shutdown()


def test_small_windows_show_a_timeline_without_scrolling(opened, browser):
    browser.set_window_size(800, 740)  # with the window's own bars, 600 are left
    bottom, height = opened().script("return [runs[0].canvas.getBoundingClientRect().bottom, innerHeight]")
    browser.set_window_size(1300, 900)
    assert bottom <= min(height, 600)


def test_picture_schedule_and_times_are_saved(opened, tmp_path):
    page = opened("a=zbv&p=4&m=6&b=")
    if page.driver.name == "firefox":
        pytest.skip("the folder of saved files is set for Chromium only")
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})

    def saved(button: str, name: str) -> Path:
        page.driver.find_element(By.XPATH, f"//button[text()='{button}']").click()
        while not (tmp_path / name).is_file():
            time.sleep(0.05)
        return tmp_path / name

    assert pipemem("check", str(saved("Schedule CSV", "zbv.csv"))).exit_code == 0
    head, *lines = saved("Times CSV", "zbv-times.csv").read_text(encoding="utf-8").splitlines()
    assert head == "device,action,chunk,microbatch,start,end,held_after" and len(lines) == 4 * 6 * 2 * 3
    assert lines[0] == "0,0F0,0,0,0,0.5,0.125"
    width, height = struct.unpack(">II", saved("Save PNG", "zbv.png").read_bytes()[16:24])
    assert width > 500 and height > 200


@pytest.fixture(scope="module")
def pyodide(tmp_path_factory) -> Path:
    """The package of Pyodide, from the npm registry."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm to get Pyodide's package")
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--ignore-scripts", "--prefix", str(folder), f"pyodide@{PYODIDE_VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot get Pyodide's package: {done.stderr.strip()[-200:]}")
    return folder / "node_modules" / "pyodide"


def test_an_exported_page_computes_in_the_browser(browser, pyodide, tmp_path):
    export(tmp_path, schedule_groups(), pyodide)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        browser.set_script_timeout(600)
        page = Explorer(browser, f"http://127.0.0.1:{site.server_port}/#a=gis&v=4&cap=.9")
        wrong, _ = page.cards()
        assert "[over-cap]" in wrong
        page.press(page.field("cap"), Keys.CONTROL, "a", Keys.NULL, "1")
        expected = explore_data({"a": "gis", "v": "4", "cap": "1"})
        told = [told["command"] for told in expected["facts"]]
        assert page.commands() == told
        # The same bits: "numbers" holds all times and memory.
        assert page.script("return data.runs.map(run => run.rows)") == [run["rows"] for run in expected["runs"]]
        assert page.errors() == []
        site.shutdown()
