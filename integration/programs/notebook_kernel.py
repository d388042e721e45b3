"""Run the cells of the file in the first argument as a notebook does: in a __main__ that is not a file."""

import sys
import types
from pathlib import Path

main = types.ModuleType("__main__")
sys.modules["__main__"] = main
for cell in Path(sys.argv[1]).read_text().split("# %%\n")[1:]:
    exec(compile(cell, "<cell>", "exec"), main.__dict__)
