"""setuptools' hooks for pip. A wheel is compiled against torch, so its build needs one; `pip install -e .` does not."""

from install import torch_pin
from setuptools.build_meta import (  # noqa: F401  as setuptools has them
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
)

# No prepare_metadata_for_build_wheel: setup.py knows by `bdist_wheel` that it makes a wheel, whose metadata differ.


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """What pip installs before it builds a wheel, unless it is told --no-build-isolation."""
    return [torch_pin(), "ninja>=1.11", "numpy>=1.26"]
