"""Compiles some of a step's files for the GPU, in its folder, and links nothing: .ci/cuda_part.py <part> <of how many>

Files of kernels and of the host are counted through, by name; of four parts, part 0 has the first, the fifth ….
"""

import pathlib
import subprocess
import sys

import ninja

from kernel_fusion import build


def main(part: int, parts: int) -> int:
    from distutils.core import run_setup  # setuptools', which the build has imported

    (extension,) = run_setup("setup.py", stop_after="init").ext_modules
    cuda, why_not = build.find_cuda()
    if not cuda:
        print(why_not, file=sys.stderr)
        return 1
    folder = pathlib.Path("../build/temp.part").resolve()
    path = build.write_ninja(extension, folder, folder / extension.name, cuda)
    command = [str(pathlib.Path(ninja.BIN_DIR, "ninja")), "-f", str(path)]
    listed = [subprocess.check_output([*command, "-t", "targets", "rule", rule], text=True) for rule in ("gpu", "host")]
    files = sorted("".join(listed).splitlines())
    own = [file for file in files if pathlib.Path(file).is_relative_to(folder / pathlib.Path.cwd().name)]
    drawn = own[part::parts]  # what it borrows is in its own step's part
    print(f"{extension.name}: {len(drawn)} of {len(own)} files, for {' '.join(cuda.architectures)}", flush=True)
    return subprocess.run([*command, "-j", str(build.parallel_jobs()), *drawn], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
