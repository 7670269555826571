"""Finds weak symbols that both the GPU's objects and the emulated ones define: .ci/weak_symbols.py <build folder>…

The folders are one step's, whose objects are compared, wherever they lie.
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


def main(folders: list[pathlib.Path]) -> int:
    def objects(kind: str) -> list[pathlib.Path]:
        return [path for folder in folders for path in folder.glob(f"**/{kind}/**/*.o")]

    emulated, gpu = objects("emulated") + objects("runtime"), objects("gpu")
    where = ", ".join(map(str, folders))
    if not emulated or not gpu:
        print(f"{where}: no objects of {'the emulation' if not emulated else 'the GPU'}", file=sys.stderr)
        return 2
    both = weak(emulated) & weak(gpu)
    common = sorted(name for name in both if not STANDARD.match(name))
    print(f"{where}: {len(gpu)} + {len(emulated)} objects, {len(both)} weak symbols in both, {len(common)} not std")
    if common:
        print(subprocess.run(["c++filt"], input="\n".join(common), capture_output=True, text=True).stdout)
    return 1 if common else 0


if __name__ == "__main__":
    sys.exit(main([pathlib.Path(argument) for argument in sys.argv[1:]]))
