"""The engine process: stock `sglang.launch_server`, ended when its agent dies.

The agent starts it as `python -m serving.worker.engine <sglang arguments>`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent and hands over to SGLang."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the agent is gone")
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    hide_keys()
    server_args = prepare_server_args(sys.argv[1:])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def hide_keys() -> None:
    """Makes `/server_info` ask for the admin key: SGLang 0.5.23 shows the key itself there to anyone."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for endpoint in (http_server.server_info, http_server.get_server_info):
        auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


if __name__ == "__main__":
    main()
