"""Execute the copies of activations to host memory and back.

Example:

    engine = OffloadEngine.on(torch.device("cuda"), host_memory=64 << 30, permanent=model.parameters())
    with engine.step():
        with engine.capture(key):  # around one forward
            output = stage(input)
        engine.offload(key, keep=[input])  # starts the copy to the host
        ...  # compute something else
        engine.wait(key)  # the device memory is free
        engine.reload(key)  # takes device memory, starts the copy back
        ...
        engine.wait(key)  # the activations may be used
        output.backward(gradient)
"""

from megatron_pipemem.features.offload.runtime.engine import OffloadEngine

__all__ = ["OffloadEngine"]
