"""python setup.py build_ext --inplace

With nvcc and a CUDA build of torch this compiles the kernels for the GPU; always, it compiles them for the emulation.
KF_CUDA=0 leaves the GPU out; KF_CUDA=1 stops where it cannot be had.
"""

from glob import glob

from setuptools import setup

from kernel_fusion.build import StepExtension, build_ext  # not installed? pip install -e ..

setup(
    name="step4_integration",
    packages=["step4_integration"],
    ext_modules=[
        StepExtension(
            "step4_integration._C",
            host=["integration_host.cpp", "pybind.cpp", *sorted(glob("host/*.cpp")), *sorted(glob("cpu/*.cpp"))],
            kernels=sorted(glob("kernels/*/*.cu")),  # compiled by nvcc, and for the emulation
            include_dirs=[".", *(f"../{step}/include" for step in ("step1-simple", "step2-attention", "step3-fused"))],
            cxx_flags=["-O3"],
            nvcc_flags=["-O3", "-lineinfo"],
        )
    ],
    cmdclass={"build_ext": build_ext},
)
