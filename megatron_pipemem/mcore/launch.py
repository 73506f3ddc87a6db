"""Enable the plugin with the flags of a command line, for ``pipemem run`` and for scripts that call this module."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from megatron_pipemem.mcore.flags import add_virtual_stages, take_flags
from megatron_pipemem.mcore.plugin import enable_with
from megatron_pipemem.mcore.run_log import show_log
from megatron_pipemem.request import Request


def enable_from_command_line(arguments: list[str] | None = None) -> list[str]:
    """Take the ``--pipemem-*`` flags off a command line, and enable the plugin with these settings.

    Args:
        arguments: the script's arguments without its name. By default those of ``sys.argv``, which is changed in place,
            so that two lines at the top of a training script are enough. Without a ``--pipemem-*`` flag nothing is
            enabled.

    Returns:
        The arguments for Megatron: without our flags, and with flags that cut the model as the schedule needs it,
            unless the user's flags already do (``flags.add_virtual_stages``).

    Raises:
        PipememError: a wrong flag, an unknown schedule, or an unsupported version of Megatron-Core.
    """
    request, others = take_flags(sys.argv[1:] if arguments is None else arguments)
    if request is not None:
        show_log()
        others = add_virtual_stages(request, others)
        enable_in_script(request)
    if arguments is None:
        sys.argv[1:] = others
    return others


def enable_in_script(request: Request) -> None:
    """Import Megatron's training loop if it is installed, and enable the plugin.

    Raises:
        PipememError: as ``enable``.
    """
    # Imported first, so that the functions of Megatron's training loop are replaced too.
    if importlib.util.find_spec("megatron.training") is not None:
        importlib.import_module("megatron.training.training")
    enable_with(request)
