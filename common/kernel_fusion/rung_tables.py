"""What must agree for a rung to be found: its file, and its row in the list in rungs.h.

The builds ask this before they compile, since nobody else would say: a file without a row compiles and is never run.

    python rung_tables.py FOLDER…    ends with 1 where something does not agree. It needs Python and nothing else.
"""

import pathlib
import re
import sys

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
PIECES = "pieces"  # of the op, each by its own `auto`: no rung, and the last row
FILE_NAME = re.compile(rf"v\d+_\w+|{PIECES}")
ROW = re.compile(r"\bRUNG\(\s*(\w+)\s*,\s*(\w+)\s*,\s*(\w+)")
NOTE = re.compile(r"^// (v\d+_\w+(?:, v\d+_\w+)*): ", re.MULTILINE)  # above the list: rungs that went, and why
LAUNCHER = "void {}(const Args& args, void* stream)"
MORE = {  # a word of a row, and what the rung's file then has
    "can_implement": "std::string {}_can_implement(const Args& args)",
    "scratch_bytes": "int64_t {}_scratch_bytes(const Args& args)",
}


def problems(folder: pathlib.Path) -> list[str]:
    """What does not agree in an op's folder, a line each; an empty list where all does.

    Args:
        folder: such as kernels/scale, with rungs.h and a .cu file for each rung.
    """
    header = folder / "rungs.h"
    if not header.is_file():
        return [f"{folder}: there is no rungs.h"]
    rows = rows_of(header)
    listed = [name for name, *_ in rows]
    found = []
    for path in sorted(folder.glob("*.cu")):
        if not FILE_NAME.fullmatch(path.stem):
            found.append(f"{path}: a rung's file must be called v<number>_<name>.cu, or pieces.cu")
        elif path.stem not in listed:
            found.append(f"{path}: {header} has no row for it; add RUNG({path.stem}, always, no_scratch)")
    for name, *words in rows:
        path = folder / f"{name}.cu"
        if listed.count(name) > 1:
            found.append(f"{header}: RUNG({name}, …) stands there {listed.count(name)} times")
        elif not path.is_file():
            found.append(f"{header}: RUNG({name}, …) has no file {path}")
        else:
            found += [f"{path}: {problem}" for problem in _problems_of_file(path, words)]
    return list(dict.fromkeys(found)) + [f"{header}: {problem}" for problem in _problems_of_order(header, listed)]


def rows_of(header: pathlib.Path) -> list[tuple[str, str, str]]:
    """The list in a rungs.h: of each row the rung, and its words for can_implement and for scratch memory."""
    return ROW.findall(_code(header))


def _problems_of_file(path: pathlib.Path, words: list[str]) -> list[str]:
    def defines(declaration: str) -> bool:
        return re.search(rf"\b{declaration.format(path.stem).split('(')[0]}\(", code) is not None

    code = _code(path)
    found = [] if defines(LAUNCHER) else [f"it does not define {LAUNCHER.format(path.stem)}"]
    for word, declaration in MORE.items():
        if word in words and not defines(declaration):
            found.append(f"it does not define {declaration.format(path.stem)}, which its row names")
        if word not in words and defines(declaration):
            found.append(f"its row does not say {word}, and so nobody asks {path.stem}_{word}")
    return found


def _problems_of_order(header: pathlib.Path, listed: list[str]) -> list[str]:
    numbers = [int(re.findall(r"\d+", name)[0]) for name in listed if name != PIECES]
    if numbers != sorted(numbers) or PIECES in listed[:-1]:
        return ["the rungs do not stand in the order of their numbers"]
    noted = {
        int(number)
        for note in NOTE.findall(header.read_text(encoding="utf-8"))
        for number in re.findall(r"\bv(\d+)_", note)
    }
    gaps = set(range(1, max(numbers, default=0))) - set(numbers) - noted
    return [f"there is no v{gap}, and no line `// v{gap}_<name>: <why>` above the list" for gap in sorted(gaps)]


def _code(path: pathlib.Path) -> str:
    return COMMENT.sub(" ", path.read_text(encoding="utf-8").replace("\\\n", " "))  # a comment goes on in the next line


def main() -> int:
    """Prints what does not agree in the folders given. Returns the exit code."""
    found = [line for folder in sys.argv[1:] for line in problems(pathlib.Path(folder))]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
