"""The rewriter's tools, as a build calls them: `python -S emulator rewrite|check|compile …`, with this folder's path.

Without what an installation brings (-S), since each source starts a process.
"""

import importlib
import sys

TOOLS = {"rewrite": "rewrite", "check": "refusals", "compile": "views"}

if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in TOOLS:
        sys.exit(f"usage: python -S emulator {'|'.join(TOOLS)} …")
    # The folder itself is on the path, as of every program that is a folder.
    sys.exit(importlib.import_module(f"rewriter.{TOOLS[sys.argv[1]]}").main(sys.argv[2:]))
