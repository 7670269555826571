"""What must agree for a rung to be found: its file, its declaration in rungs.h and its row in rungs.cpp.

The builds ask this before they compile, since nobody else would say: a file without a row compiles and is never run.

    python rung_tables.py FOLDER…    ends with 1 where something does not agree. It needs Python and nothing else.
"""

import pathlib
import re
import sys

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
FILE_NAME = re.compile(r"v\d+_\w+")
DECLARED = re.compile(r"\bvoid\s+(v\d+_\w+)\s*\(\s*const\s+Args\s*&")
ROW = re.compile(r'\{\s*"([^"]*)"\s*,\s*(\w+)\s*,')


def problems(folder: pathlib.Path) -> list[str]:
    """What does not agree in an op's folder, a line each; an empty list where all does.

    Args:
        folder: such as kernels/scale, with rungs.h, rungs.cpp and a .cu file for each rung.
    """
    files = sorted(path.stem for path in folder.glob("*.cu"))
    table, header = folder / "rungs.cpp", folder / "rungs.h"
    absent = [path for path in (table, header) if not path.is_file()]
    if absent:
        return [f"{folder}: there is no {path.name}" for path in absent]
    rows = ROW.findall(_code(table))
    listed = [name for name, _ in rows]
    declared = DECLARED.findall(_code(header))
    found = []
    for name in files:
        path = folder / f"{name}.cu"
        if not FILE_NAME.fullmatch(name):
            found.append(f"{path}: a rung's file must be called v<number>_<name>.cu")
        elif name not in listed:
            found.append(f'{path}: {table} has no row for it; add {{"{name}", {name}, …}}')
        elif name not in declared:
            found.append(f"{path}: {header} does not declare void {name}(const Args& args, void* stream)")
        elif not re.search(rf"\bvoid\s+{name}\s*\(", _code(path)):
            found.append(f"{path}: it does not define void {name}(const Args& args, void* stream)")
    for name, launcher in rows:
        if name not in files:
            found.append(f'{table}: row "{name}" has no file {folder / f"{name}.cu"}')
        elif launcher != name:
            found.append(f'{table}: row "{name}" launches {launcher}')
    found += [f'{table}: row "{name}" stands there {listed.count(name)} times' for name in _repeated(listed)]
    for name in declared:
        if name not in files and name not in listed:
            found.append(f"{header}: {name} is declared, and has neither a row in {table} nor a file")
    return found


def _code(path: pathlib.Path) -> str:
    return COMMENT.sub(" ", path.read_text(encoding="utf-8"))


def _repeated(names: list[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def main() -> int:
    """Prints what does not agree in the folders given. Returns the exit code."""
    found = [line for folder in sys.argv[1:] for line in problems(pathlib.Path(folder))]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
