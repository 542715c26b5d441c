"""The CUDA kernels compile for real devices; how they are scheduled; what is kept on disk."""

import ctypes

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.cuda import nvidia
from scanlib.backends.cuda.launch import KernelLoop
from scanlib.backends.cuda.linear import LinearKernels
from scanlib.backends.cuda.nvidia import (
    KernelCompileError,
    NoCompilerError,
    compile_kernels,
    find_nvrtc,
)
from scanlib.backends.cuda.parameters import contiguous
from scanlib.backends.cuda.schedule import choose
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.backends.cuda.test_cuda_kernels import channels
from tests.backends.cuda.test_cuda_until import scalars, vectors
from tests.cubin import resources
from tests.cuda_device import host_library
from tests.families import FAMILIES
from tests.linear import Recurrence
from tests.modes import MODES

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
TYPES = ("affine", "affine-complex", "two-complex", "affine-i8", "affine-f32", "affine-u8",
         "cumprod", "extremes", "minimum-i32", "log-affine", "arma", "shift-register",
         "mixed-taps")  # fmt: skip


def kernels(inputs, outputs):
    """Return the kernels of the elementwise loops of a function."""
    function = pytensor.function(inputs, outputs, mode=MODES["c"], on_unused_input="ignore")
    ops = [node.op for node in function.maker.fgraph.toposort()]
    return [KernelLoop(op) for op in ops if isinstance(op, ElemwiseScan)]


def launched(loop, *shape):
    """Return the names of the kernels that a call launches, of arrays of one shape."""
    inputs = loop.parameters.inputs
    shapes = [shape if array.lead and array.name in loop.writer.plan.outer.sequences
              else (1, *shape[1:])[1 - array.lead :] for array in inputs]  # fmt: skip
    arrays = zip(shapes, inputs, strict=True)
    strides = [contiguous(own, np.dtype(array.dtype).itemsize) for own, array in arrays]
    call = loop.call(loop.sizes(shapes), strides, 132)
    return [call.kernels.names[one.kernel] for one in call.launches]


def half_precision():
    a, b, h0 = (pt.tensor(name, dtype="float16", shape=(None,) * n) for name, n in
                (("a", 2), ("b", 2), ("h0", 1)))  # fmt: skip
    h = scanlib.scan(lambda a, b, h: pt.tanh(a * h + b), [a, b], h0, return_updates=False)
    return [a, b, h0], h


@pytest.fixture(scope="module")
def sources():
    """The translation units of every instance of the template."""
    found = {name: kernels(*FAMILIES[name].render()) for name in TYPES}
    found["channels"] = kernels(*channels())
    found["half"] = kernels(*half_precision())
    found["until"] = kernels(*vectors())
    found["until, scalars"] = kernels(*scalars())
    assert all(found.values())
    return {
        name: [loop.unit(unit).source for loop in loops for unit in loop.writer.units()]
        for name, loops in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_instance_compiles(sources, architecture):
    found = find_nvrtc()
    if found is None:
        pytest.skip("no NVRTC on this machine")
    seen = set()
    for name, texts in sources.items():
        for text in texts:
            code = compile_kernels(text, architecture)
            assert code[:4] == b"\x7fELF", name
            for kernel, used in resources(code).items():
                if kernel.startswith("look_back"):
                    seen.add(kernel)
                    assert used["registers"] <= 128, (name, kernel)
                    # A few numbers that live long; compilers differ in how many.
                    assert used["stack"] <= 96, (name, kernel)
    assert seen == {"look_back", "look_back_dense"}


def ptx(nvrtc, source):
    """Return what a translation unit is before it is made for one architecture."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library = nvrtc.library
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None)
    options = [b"--gpu-architecture=compute_80", b"--device-as-default-execution-space"]
    options += [option.encode() for option in nvidia.OPTIONS]
    assert not library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, text)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return text.value.decode()


def test_kernels_that_look_back_wait_for_what_is_published():
    """Flags are stored after values and loaded before them; one channel moves in large steps."""
    found = find_nvrtc()
    if found is None:
        pytest.skip("no NVRTC on this machine")
    (loop,) = kernels(*FAMILIES["affine-f32"].render())
    entries = ptx(found, loop.unit("look_back").source).split(".visible .entry ")
    dense, spread = (
        next(text for text in entries if text.startswith(f"{name}("))
        for name in ("look_back_dense", "look_back")
    )
    for text in (dense, spread):
        assert text.count("st.release.gpu") >= 3
        assert text.count("ld.acquire.gpu") >= text.count("st.release.gpu")
        assert "atom.global.add" in text or "atom.add" in text
        assert "ld.global.nc.f32" in text
        assert "ld.shared.v4.f32" in text
        assert "ld.v4.f32" in text or "ld.global.v4.f32" in text  # what others have published
        assert "st.v4.f32" in text or "st.global.v4.f32" in text
    # Places of one channel are constants apart: they take no arithmetic.
    steps = [line for line in dense.splitlines() if "ld.global.nc.f32" in line]
    assert sum("+" in line for line in steps) >= 30


REAL, FIXED = Recurrence("real", "steps"), Recurrence("real", "fixed", "right", reverse=True)
LINEAR = [  # every template and semiring, at the largest sizes of each
    (REAL, "float32", 2), (REAL, "float64", 8), (REAL, "complex128", 5), (REAL, "float16", 33),
    (REAL, "float64", 64), (REAL, "complex128", 32), (FIXED, "float16", 4),
    (FIXED, "complex64", 8), (FIXED, "complex64", 64), (FIXED, "float64", 9),
    (Recurrence("real", "fixed", has_mask=True), "float32", 8),
    (Recurrence("real", "steps", has_mask=True, untraced=True), "float64", 64),
    (Recurrence("log", "steps"), "float32", 8), (Recurrence("log", "fixed"), "float64", 64),
    (Recurrence("max", "steps", has_offset=False), "float64", 7),
    (Recurrence("max", "fixed"), "float16", 12), (Recurrence("min", "fixed"), "float32", 5),
    (Recurrence("min", "steps", untraced=True), "float64", 17),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_instance_of_matrix_recurrences_compiles(architecture):
    found = find_nvrtc()
    if found is None:
        pytest.skip("no NVRTC on this machine")
    for form, dtype, size in LINEAR:
        ranks = [3 if form.coefficient == "steps" else 2, *[2] * (1 + form.has_offset)]
        values = [np.ones((1,) * rank, dtype) for rank in ranks]
        op = form.operation([*values, *[np.ones((1, 1), bool)] * form.has_mask])
        kernels = LinearKernels(op, size)
        assert compile_kernels(kernels.source, architecture)[:4] == b"\x7fELF", (op, dtype, size)


@pytest.mark.slow
def test_the_compiler(sources):
    found = find_nvrtc()
    if found is None:
        pytest.skip("no NVRTC on this machine")
    assert found.version.startswith("nvrtc")
    assert b"walk" in found.compile(sources["affine-f32"][1], "sm_90")


def test_what_does_not_compile_says_why():
    found = find_nvrtc()
    if found is None:
        pytest.skip("no NVRTC on this machine")
    with pytest.raises(KernelCompileError, match="nothing_of_this_name"):
        found.compile("__global__ void f() { nothing_of_this_name(); }", "sm_90")


class TestDisk:
    def test_code_is_compiled_once_for_each_source_architecture_and_compiler(
        self, tmp_path, monkeypatch
    ):
        class Compiler:
            version = "first"
            asked = 0

            def compile(self, source, architecture):
                self.asked += 1
                return f"{self.version} {architecture} {source}".encode()

        one = Compiler()
        monkeypatch.setattr(nvidia, "find_compiler", lambda: one)
        monkeypatch.setattr(nvidia, "folder", lambda: tmp_path / "new")
        for _ in range(2):
            assert compile_kernels("x", "sm_80") == b"first sm_80 x"
        assert one.asked == 1
        assert compile_kernels("x", "sm_90") == b"first sm_90 x"
        assert compile_kernels("y", "sm_80") == b"first sm_80 y"
        one.version = "second"
        assert compile_kernels("x", "sm_80") == b"second sm_80 x"
        assert one.asked == 4
        assert len(list(tmp_path.rglob("*.cubin"))) == 4

    def test_no_compiler(self, monkeypatch):
        monkeypatch.setattr(nvidia, "find_nvrtc", lambda: None)
        with pytest.raises(NoCompilerError, match="pip install nvidia-cuda-nvrtc"):
            compile_kernels("x", "sm_80")


def test_no_driver():
    with pytest.raises(OSError, match="no_such_library"):
        nvidia.Driver("libno_such_library.so")


class TestSchedule:
    """132 multiprocessors; blocks of 256 threads with 16 steps each."""

    @staticmethod
    def choose(steps, channels, composes=True, processors=132, **more):
        return choose(steps, channels, processors, composes, 256, 16, **more)

    def test_many_channels_have_one_thread_each(self):
        plan = self.choose(65_536, 8 * 1536)
        assert (plan.kind, plan.chunks, plan.chunk) == ("serial", 1, 65_536)
        assert plan.threads == 32
        assert plan.ahead == 16  # few threads: each must ask for much
        plan = self.choose(1000, 1_000_000)
        assert (plan.kind, plan.threads, plan.ahead) == ("serial", 128, 4)

    def test_steps_that_do_not_compose_have_one_thread_per_channel(self):
        assert self.choose(10**6, 3, composes=False).kind == "serial"

    def test_hundreds_of_channels_have_a_block_per_tile(self):
        plan = self.choose(10_000, 8000)
        assert (plan.kind, plan.lanes, plan.chunks) == ("rows", 16, 1)

    def test_few_long_rows_are_cut(self):
        plan = self.choose(10**8, 1)
        assert (plan.kind, plan.lanes, plan.chunk) == ("look-back", 1, 4096)
        plan = self.choose(10**6, 64)
        assert (plan.kind, plan.lanes, plan.chunk) == ("look-back", 8, 512)

    def test_kernels_of_a_schedule(self):
        (loop,) = kernels(*FAMILIES["affine-f32"].render())
        assert launched(loop, 10**7) == ["reset", "look_back_dense", "mend"]
        assert launched(loop, 1000) == ["walk"]

    def test_short_rows_are_not(self):
        assert self.choose(10_000, 1).kind == "rows"
        assert self.choose(20, 1).kind == "serial"

    @pytest.mark.all_forms
    @pytest.mark.parametrize("steps", [0, 1, 63, 64, 65, 4095, 4096, 4097, 99_991, 10**7])
    @pytest.mark.parametrize("processors", [1, 16, 132])
    def test_chunks_cover_all_steps(self, steps, processors):
        for count in (1, 2, 3, 7, 8, 31, 64, 500, 10_000):
            plan = self.choose(steps, count, processors=processors)
            assert plan.chunks >= 1
            assert (plan.chunks - 1) * plan.chunk < max(steps, 1) <= plan.chunks * plan.chunk
            assert plan.lanes in (1, 2, 4, 8, 16, 32)
            assert plan.lanes < 2 * count
            if plan.kind == "look-back":
                assert plan.chunks > 1
                assert plan.chunk == 256 // plan.lanes * 16


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["JAX", "PYTORCH"])
def test_explain_tells_of_kernels(mode):
    pytest.importorskip({"JAX": "jax", "PYTORCH": "torch"}[mode])
    inputs, output = FAMILIES["affine-f32"].render()
    function = pytensor.function(inputs, output, mode=mode)
    cut = "as kernels on CUDA devices, where few rows of many steps are read once; "
    assert cut in scanlib.explain(function).loops[0].runs
    several = pytensor.function(*FAMILIES["arma"].render(), mode=mode)
    assert "as kernels on CUDA devices; " in scanlib.explain(several).loops[0].runs
    with pytensor.config.change_flags(scanlib__cuda=False):
        assert "CUDA" not in scanlib.explain(function).loops[0].runs
    far = pytensor.function(*FAMILIES["far"].render(), mode=mode)
    assert "CUDA" not in scanlib.explain(far).loops[0].runs


@pytest.mark.parametrize("mode", ["JAX", "PYTORCH"])
def test_explain_tells_of_kernels_of_matrix_recurrences(mode):
    pytest.importorskip({"JAX": "jax", "PYTORCH": "torch"}[mode])

    def runs(size, dtype="float32"):
        shapes = (None, size, size), (None, size), (None, size)
        inputs = [pt.tensor(dtype=dtype, shape=shape) for shape in shapes]
        function = pytensor.function(inputs, Recurrence("real", "steps")(*inputs), mode=mode)
        return scanlib.explain(function).loops[0].runs

    assert "as kernels on CUDA devices; " in runs(3)
    assert "as kernels on CUDA devices, if the matrix has 64 rows at most; " in runs(None)
    assert "CUDA devices, if the matrix has 32 rows at most; " in runs(None, "complex128")
    assert "as kernels on CUDA devices; by " in runs(32, "complex128")
    assert "CUDA" not in runs(33, "complex128")
    with pytensor.config.change_flags(scanlib__cuda=False):
        assert "CUDA" not in runs(3)


def test_numbers_of_a_kernel_have_one_place_each():
    (loop, *_) = kernels(*channels())
    parameters = loop.parameters
    assert len(set(parameters.place.values())) == len(parameters.place)
    assert ctypes.sizeof(ctypes.c_longlong) * parameters.count < 4096
    strides = [(0,) * (array.lead + len(array.axes)) for array in parameters.arrays]
    packed, slots = parameters.pack({"steps": 5}, strides, [1] * len(strides))
    assert (packed[0], len(packed)) == (5, parameters.count)
    assert len(set(slots)) == len(slots) == len(parameters.arrays)
    source = (
        loop.unit("serial").source
        + """
    extern "C" int64_t size() { return sizeof(Params); }
    extern "C" int64_t place(const Params *p, int k) { return (char *)&p->at[k].data - (char *)p; }
    """
    )
    library = ctypes.CDLL(str(host_library(source)))
    assert library.size() == 8 * parameters.count
    for k, array in enumerate(parameters.arrays):
        assert library.place(None, k) == 8 * parameters.place[array.name]
