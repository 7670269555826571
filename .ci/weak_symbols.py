"""Finds weak symbols that both the GPU's objects and the emulated ones define: .ci/weak_symbols.py <build folder>…

The linker keeps one of two weak definitions, whichever comes first, so a function compiled for both backends under
one name would run the other backend's code. The standard library's functions are the same in both and may appear.
"""

import pathlib
import re
import subprocess
import sys

# A mangled name whose outermost scope is std:: or __gnu_cxx::, type information and guards among them; placement new.
STANDARD = re.compile(
    r"_Z(T[VTISC]|GV|GR|Z)?N?[KVrRO]*(St|S[absiod]|9__gnu_cxx)|_Zn[wa]mPv$|DW\.ref\.__gxx_personality_v0$"
)


def weak(objects: list[pathlib.Path]) -> set[str]:
    """The weak symbols that these objects define."""
    listed = subprocess.run(["nm", "--defined-only", *objects], stdout=subprocess.PIPE, text=True, check=True).stdout
    return set(re.findall(r"^[0-9a-f]* ?[WVu] (\S+)$", listed, re.MULTILINE))


def main(folders: list[str]) -> int:
    bad = 0
    for folder in map(pathlib.Path, folders):
        emulated = [path for kind in ("emulated", "runtime") for path in folder.glob(f"**/{kind}/**/*.o")]
        gpu = list(folder.glob("**/gpu/**/*.o"))
        if not emulated or not gpu:
            print(f"{folder}: no objects of {'the emulation' if not emulated else 'the GPU'}", file=sys.stderr)
            return 2
        both = weak(emulated) & weak(gpu)
        common = sorted(name for name in both if not STANDARD.match(name))
        print(
            f"{folder}: {len(gpu)} + {len(emulated)} objects, {len(both)} weak symbols in both, {len(common)} not std"
        )
        if common:
            print(subprocess.run(["c++filt"], input="\n".join(common), capture_output=True, text=True).stdout)
        bad += len(common)
    return 1 if bad or not folders else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
