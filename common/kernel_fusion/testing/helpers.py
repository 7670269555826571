"""Small helps for test files."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from kernel_fusion import steps
from kernel_fusion.console import captured


@contextlib.contextmanager
def raises(exception: type[BaseException], *fragments: str) -> Iterator[Any]:
    """As pytest.raises, and the message must contain every fragment."""
    with pytest.raises(exception) as caught:
        yield caught
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    if missing:
        raise AssertionError(f"the message lacks {missing}: {caught.value}") from caught.value


def main(file: str) -> NoReturn:
    """Runs the tests in `file`, and in the folder `tests` beside it, where there is one: those of the whole step.

    The command line's further arguments are pytest's, and the exit code is, too.
    """
    folder = pathlib.Path(file).with_name("tests")
    sys.exit(pytest.main([file, *([str(folder)] if folder.is_dir() else []), *sys.argv[1:]]))


def check_not_built(module: str, folder: pathlib.Path) -> None:
    """A step without its library says how to build it. `folder`: where its Python part is copied to."""
    step = steps.find(module)
    for part in ("common/kernel_fusion", f"{step.folder}/{module}"):
        (folder / part).mkdir(parents=True)
        for source in (steps.ROOT / part).glob("*.py"):
            (folder / part / source.name).write_bytes(source.read_bytes())
    ran = captured([sys.executable, "-c", f"import {module}"], folder, PYTHONPATH=steps.python_path(folder))
    assert ran.returncode == 1
    assert f"{module} is not built" in ran.stderr
    assert f"cd {step.folder} && python setup.py build_ext --inplace" in ran.stderr


def without_progress(said: str) -> str:
    """Standard error of a command without the lines that `console.progress` writes where a machine is slow."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.endswith(" …\n"))
