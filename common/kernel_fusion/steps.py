"""The four steps: where they are, and how they are loaded."""

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import types
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Step(NamedTuple):
    """A step: its folder, its Python module, and its test file."""

    folder: str
    module: str
    test: str

    @property
    def path(self) -> pathlib.Path:
        return ROOT / self.folder

    @property
    def package(self) -> pathlib.Path:
        """Where its Python module lies: in the step's folder, or beside this package where a wheel brought both."""
        in_tree = self.path / self.module
        return in_tree if in_tree.is_dir() else pathlib.Path(__file__).resolve().parents[1] / self.module


STEPS = (
    Step("step1-simple", "step1_simple", "test.py"),
    Step("step2-attention", "step2_attention", "test_attention.py"),
    Step("step3-fused", "step3_fused", "test_fused.py"),
    Step("step4-integration", "step4_integration", "test_integration.py"),
)


def find(name: str) -> Step:
    """The step called `name`: its folder ("step2-attention"), module ("step2_attention") or number ("2", "step2").

    Raises:
        ValueError: no such step.
    """
    for number, step in enumerate(STEPS, start=1):
        if name.rstrip("/") in (step.folder, step.module, str(number), f"step{number}"):
            return step
    raise ValueError(f"`step` must be one of {', '.join(s.folder for s in STEPS)}, got {name!r}")


# Where the packages lie. `pip install -e .` tells Python; who runs a copy of the tree says it himself.
IMPORTED_FROM = (".", "common", *(step.folder for step in STEPS))


def python_path(root: pathlib.Path = ROOT) -> str:
    """PYTHONPATH with which a child imports all packages from the tree at `root`, before any that are installed."""
    own = [os.path.normpath(root / folder) for folder in IMPORTED_FROM]
    return os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH", "")]))


def build_command(step: Step) -> str:
    """The command that builds `step`, as a user would type it at the repository's root."""
    return f"cd {step.folder} && python setup.py build_ext --inplace"


def is_built(step: Step) -> bool:
    """True where the step's library for this Python lies in its place."""
    return any((step.package / f"_C{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES)


def load_script(step: Step, name: str) -> types.ModuleType:
    """`name`.py in the step's folder, such as "benchmark" or "peers/triton_kernels", as a module.

    An import would find another step's file of that name as well.
    As where Python runs a script, the modules beside it can be imported from then on.
    """
    if str(step.path) not in sys.path:
        sys.path.append(str(step.path))
    return load_file(f"{step.module}_{name.replace('/', '_')}", step.path / f"{name}.py")


def load_file(name: str, path: pathlib.Path) -> types.ModuleType:
    """The module or the extension at `path`, from now on the one that is imported as `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is neither a Python file nor an extension")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def load_benchmark(step: Step) -> types.ModuleType:
    """The step's benchmark.py as a module: its `TEACHES` and `cases`."""
    return load_script(step, "benchmark")


def check_torch(version: str) -> None:
    """Refuses a torch that is not the one for which the installed wheel was built.

    Raises:
        ImportError: `version` is of another minor version than the wheel's metadata ask for.
    """
    needed = next(r for r in importlib.metadata.requires("kernel-fusion") or [] if r.startswith("torch=="))
    built = needed.removeprefix("torch==").removesuffix(".*")
    if not version.startswith(f"{built}."):
        raise ImportError(
            f"kernel-fusion was built for torch {built}, and this is torch {version}; "
            f"pip install '{needed}', or build it for this torch: pip install --no-build-isolation . in its repository"
        )


def load(module: str) -> types.ModuleType:
    """The compiled part of a step, `<module>._C`.

    Raises:
        ImportError: the step is not built, or it came in a wheel for another torch; the text says what to do.
    """
    step = find(module)
    if f"{module}._C" not in sys.modules and not is_built(step):  # `profile` on the CPU loads another build of it
        raise ImportError(f"{module} is not built for this Python; build it with: {build_command(step)}")
    import torch  # its libraries must be loaded before the extension that links to them

    if not step.path.is_dir():
        check_torch(torch.__version__)
    return importlib.import_module(f"{module}._C")
