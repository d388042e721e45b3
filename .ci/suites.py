"""The suites of tests that others wrote, for `scorecard.py`: their programs, and what these run with."""

from __future__ import annotations

import ast
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A program of a suite, which runs in processes of its own.

    Attributes:
        name: which the files of `scorecards` know it by.
        arguments: of Python; LOGS in one becomes the directory of its output.
        variables: that it needs, with LOGS alike.
        is_pytest: whether pytest runs it, and can report on each of its tests.
        timeout_s: after which it is ended, in seconds.
        gives_up: what it says if it ends without having done anything, and without an error.
    """

    name: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    is_pytest: bool = False
    timeout_s: float = 900
    gives_up: str = ""


@dataclass(frozen=True)
class Suite:
    """A suite.

    Attributes:
        what: a sentence on what is run.
        source: where its files are from.
        path: what a user gives as its path.
        packages: whose versions count, beside torch's.
        programs: finds its programs in the path.
        variables: of all its programs.
        directories: the first, in its path, is the working directory; Python finds modules in all.
    """

    what: str
    source: str
    path: str
    packages: tuple[str, ...]
    programs: Callable[[Path], Iterator[Program]]
    variables: Mapping[str, str]
    directories: tuple[str, ...] = (".",)

    def paths(self, root: Path) -> list[Path]:
        """Return the directories."""
        return [root / directory for directory in self.directories]


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
WRAPPERS = {
    "run_pt_xla_debug": {"PT_XLA_DEBUG": "1", "PT_XLA_DEBUG_FILE": "LOGS/pt_xla_debug.txt"},
    "run_save_tensor_hlo": {"XLA_SAVE_TENSORS_FMT": "hlo", "XLA_SAVE_TENSORS_FILE": "LOGS/saved_tensors.txt"},
    "run_xla_hlo_debug": {"XLA_HLO_DEBUG": "1"},
    "run_xla_ir_hlo_debug": {"XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1"},
}
"""Variables that the shell functions of torch_xla's lists set.
Source: test/utils/run_tests_utils.sh and test/run_tests.sh of torch_xla 2.9.0.
"""


def torch_xla_list(text: str) -> Iterator[Program]:
    """Yield the programs of lines such as ``XLA_IR_DEBUG=1 run_test "$_TEST_DIR/test_metrics.py" -v``."""
    for line in text.splitlines():
        match = re.fullmatch(r'\s*((?:\w+=\S+ |run_\w+ )*)run_\w+ "\$_TEST_DIR/(\S+)"(.*)', line)
        if match is None:
            continue
        words = [*match[1].split(), line.split('"')[0].split()[-1]]
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        for word in words:
            variables |= WRAPPERS.get(word, {})
        options = tuple(option for option in shlex.split(match[3]) if option != "$@")
        name = " ".join((match[2], *(option for option in options if option != "-v")))
        yield Program(name, (match[2], *options), variables)


def torch_xla_tpu(root: Path) -> Iterator[Program]:
    """Yield the list of TPU tests."""
    return torch_xla_list((root / "test/tpu/run_tests.sh").read_text())


def torch_xla_replicas(root: Path) -> Iterator[Program]:
    """Yield the list of tests of several replicas."""
    text = (root / "test/run_tests.sh").read_text()
    match = re.search(r"^function run_mp_op_tests {$(.*?)^}$", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return torch_xla_list(match[1])


def torch_xla_pallas(_: Path) -> Iterator[Program]:
    """Yield the tests of kernels, which have a list of their own."""
    # The checkout has a directory torch_xla, which pytest would otherwise import.
    pytest = (*PYTEST, "--import-mode=importlib")
    yield Program("test_pallas.py", (*pytest, "test_pallas.py"), is_pytest=True, timeout_s=3600)
    yield Program("test_pallas_spmd.py", ("test_pallas_spmd.py",))
    variables = {"XLA_DISABLE_FUNCTIONALIZATION": "1"}
    yield Program("test_pallas_spmd.py without functionalization", ("test_pallas_spmd.py",), variables)


def lightning(root: Path) -> Iterator[Program]:
    """Yield the files of Lightning's and Fabric's tests for TPUs, and each standalone test alone."""
    for path in sorted(root.glob("tests/tests_*/**/test_*.py")):
        decorated = {
            node.name: " ".join(map(ast.unparse, node.decorator_list))
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        on_tpu = {name: text for name, text in decorated.items() if "tpu=True" in text}
        alone = [name for name, text in on_tpu.items() if "standalone=True" in text]
        directory = Path(*path.relative_to(root).parts[:2])
        name = str(path.relative_to(root / "tests"))
        options = (*PYTEST, "--timeout=300", f"--rootdir={root / directory}")
        # A standalone test is skipped without the variable, and every other test with it.
        if len(on_tpu) > len(alone):
            yield Program(name, (*options, name), is_pytest=True)
        for test in alone:
            arguments = (*options, f"{name}::{test}")
            yield Program(f"{name}::{test}", arguments, {"PL_RUN_STANDALONE_TESTS": "1"}, is_pytest=True)


CI = Path(__file__).parent


def torch_suite(name: str, directory: str, *patterns: str) -> Suite:
    """Return a suite of PyTorch's distributed tests: one program, whose replicas stay for all its tests."""

    def programs(root: Path) -> Iterator[Program]:
        card = tomllib.loads((CI / "scorecards" / f"{name}.toml").read_text())
        paths = {path for pattern in patterns for path in (root / directory).glob(pattern)}
        left_out = card.get("not run", {})
        files = {str(path.relative_to(root / directory)) for path in paths} - set(left_out)
        options = (f"--deselect={test}" for test in left_out if "::" in test)
        # Each of its tests has a limit of its own.
        arguments = (str(CI / "torch_suite.py"), *sorted(files), *options)
        yield Program(name, arguments, is_pytest=True, timeout_s=3 * 3600)

    return Suite(
        f"PyTorch's {directory.removeprefix('test/')} tests on TorchTPU, in the replicas of an emulated v5e, "
        "with its device in place of CUDA.",
        f"{', '.join(patterns)} in {directory} of PyTorch 2.6",
        "PYTORCH",
        ("torch_tpu",),
        programs,
        {"POLYXLA_STALL_TIMEOUT_S": "30", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"},
        (directory, "test", str(CI)),
    )


FOR_DEVICES = ("-p", "torch_device", "--noconftest")


def slices(suite: str, chosen: int, count: int, name: str, *options: str) -> Iterator[Program]:
    """Yield the first slices of tests for devices; a run can stop between them."""
    for number in range(1, chosen + 1):
        arguments = (str(CI / "torch_file.py"), suite, f"--slice={number}/{count}", *options)
        yield Program(f"{name} {number}/{count}", arguments, is_pytest=True, timeout_s=3600)


def operators(_: Path) -> Iterator[Program]:
    """Yield a fourth of the tests that compare each operator with the CPU, or with NumPy."""
    chosen = "(test_compare_cpu or test_numpy_ref) and not cpu__refs"
    options = (*FOR_DEVICES, "--cuda-too", "-k", chosen, "test_ops.py")
    yield from slices("operators", 5, 20, "test_ops.py", *options)


def gradients(_: Path) -> Iterator[Program]:
    """Yield a sample of what compares gradients with the CPU's, and bfloat16 with NumPy."""
    parity = ("--cuda-too", "-k", "test_cpu_gpu_parity")
    numerics = ("-k", "reference_numerics and tpu_bfloat16 and not _refs")
    for file, count, options in (
        ("test_modules.py", 5, parity),
        ("test_unary_ufuncs.py", 20, numerics),
        ("test_binary_ufuncs.py", 12, numerics),
    ):
        yield from slices("gradients", 1, count, file, *FOR_DEVICES, *options, file)


def device_tests(_: Path) -> Iterator[Program]:
    """Yield tests that PyTorch has for every device; some of their files have others, for the CPU."""
    for file in ("test_indexing.py", "test_view_ops.py"):
        yield from slices("torch", 1, 1, file, *FOR_DEVICES, "-k", "PRIVATEUSE1 or TPU", file)


def types(_: Path) -> Iterator[Program]:
    """Yield the tests of the types of results, and of indexing."""
    for file in ("test_type_promotion.py", "test_indexing.py"):
        yield from slices("torch_xla-torch", 1, 1, file, "--noconftest", "-k", "XLA", file)


SAMPLED = {
    "test_torch.py": 16,
    "test_autograd.py": 4,
    "test_nn.py": 30,
    "nn/test_convolution.py": 8,
    "nn/test_pooling.py": 4,
    "nn/test_dropout.py": 2,
    "nn/test_embedding.py": 12,
    "test_optim.py": 40,
    "test_reductions.py": 120,
    "test_tensor_creation_ops.py": 30,
}
"""Of each file of tests for every device one in so many runs."""
FOR_EVERY_DEVICE = "_tpu and not upsamplingBiMode2d_consistency"
"""Half of test_nn.py are parameters of that one test."""


def device_sample(_: Path) -> Iterator[Program]:
    """Yield a sample of the tests that PyTorch has for every device."""
    for file, count in SAMPLED.items():
        yield from slices("torch-sample", 1, count, file, *FOR_DEVICES, "-k", FOR_EVERY_DEVICE, file)


TORCHCTS_SHARE = 60
OPINFO_SHARE = 400


def torchcts(_: Path) -> Iterator[Program]:
    """Yield a sample of the tests that TorchCTS has for what TorchTPU declares."""
    spec = find_spec("torchcts")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    # Without -c, pytest finds this project's settings. TorchCTS needs Python's own stderr.
    settings = (f"--rootdir={package.parent}", f"-c{os.devnull}", "--capture=no")
    options = (*settings, "-ptorchcts_plugin", "--results-dir=LOGS")
    # Those of torch's database of operators compile many programs each.
    opinfo = str(package / "opinfo")
    # TorchCTS's tests of itself are no tests of a device.
    others = {str(path.parent) for path in package.glob("*/test_*.py")} - {opinfo, str(package / "selftest")}
    yield from slices("torchcts", 1, TORCHCTS_SHARE, "others", *options, *sorted(others))
    yield from slices("torchcts", 1, OPINFO_SHARE, "opinfo", *options, opinfo)


def accelerate_scripts(root: Path, *launcher: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each of Accelerate's scripts, and Python's arguments that start it."""
    scripts = root / "src/accelerate/test_utils/scripts"
    for path in sorted(scripts.rglob("test_*.py")):
        name = path.relative_to(scripts)
        module = ".".join(("accelerate.test_utils.scripts", *name.with_suffix("").parts))
        # It starts its processes itself.
        words = () if name.stem == "test_notebook" else launcher
        yield str(name), (*words, "-m", module)


def accelerate(root: Path) -> Iterator[Program]:
    """Yield Accelerate's scripts, each in two processes of torchrun: some check what holds for two only."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    for name, arguments in accelerate_scripts(root, *torchrun):
        yield Program(name, arguments)


REPLICAS = {"v4-8": 4, "v3-8": 8}
"""Of each kind of TPU that Accelerate's scripts run on: processes on v4, threads of four processes on v3."""


def accelerate_torch_xla(root: Path) -> Iterator[Program]:
    """Yield Accelerate's scripts as its launcher starts them on a TPU host, and its own test of that."""
    launch = ("-m", "accelerate.commands.launch", "--tpu", "--main_training_function", "main")
    for kind, replicas in REPLICAS.items():
        variables = {"POLYXLA_EMULATE": kind, "ACCELERATE_NUM_PROCESSES": str(replicas)}
        for name, arguments in accelerate_scripts(root, *launch):
            yield Program(f"{kind} {name}", arguments, variables)
        checks = str(CI / "accelerate_checks.py")
        yield Program(f"{kind} test_script.py without those faults", (*launch, checks), variables)
        # Without -c, pytest finds settings that are not meant for one file of theirs.
        test = str(root / "tests/test_tpu.py")
        options = (*PYTEST, f"--rootdir={root}", f"-c{os.devnull}", test)
        yield Program(f"{kind} tests/test_tpu.py", options, variables, is_pytest=True)


CHIPS = 4
TITAN = {
    "fsdp2": (4, "--parallelism.data_parallel_shard_degree=4"),
    "hsdp": (4, "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=2"),
    "tp": (1, "--parallelism.tensor_parallel_degree=4"),
    "fsdp2-tp": (2, "--parallelism.data_parallel_shard_degree=2 --parallelism.tensor_parallel_degree=2"),
    "fsdp2-cp": (2, "--parallelism.data_parallel_shard_degree=2 --parallelism.context_parallel_degree=2"),
    "pp": (1, "--parallelism.pipeline_parallel_degree=4 --parallelism.pipeline_parallel_schedule=1F1B"),
    "fsdp2-compile": (4, "--compile.enable --compile.backend=tpu"),
    "fsdp2-compile-inductor": (4, "--compile.enable"),
    "fsdp2-checkpoint": (4, "--checkpoint.interval=5"),
}
"""Ways to divide torchtitan's debug model among chips: the parts of a batch, and torchtitan's options."""


def torchtitan(_: Path) -> Iterator[Program]:
    """Yield trainings, each of which ends with a comparison of its losses with the CPU's."""
    program = str(Path(__file__).with_name("titan_on_tpu.py"))
    for name, (parts, options) in TITAN.items():
        yield Program(name, (program, str(parts), *options.split()), {"TITAN_FOLDER": "LOGS"}, timeout_s=600)


EXAMPLES = (
    "ddp/example.py",
    "tensor_parallelism/tensor_parallel_example.py",
    "tensor_parallelism/sequence_parallel_example.py",
    "tensor_parallelism/fsdp_tp_example.py",
    "FSDP2/example.py",
    "minGPT-ddp/mingpt/main.py",
    "ddp-tutorial-series/multigpu.py 2 1",
    "ddp-tutorial-series/multigpu_torchrun.py 2 1",
    "ddp-tutorial-series/multinode.py 2 1",
    "FSDP/T5_training.py",
    "rpc/ddp_rpc/main.py",
    "rpc/rnn/main.py",
)


def examples(_: Path) -> Iterator[Program]:
    """Yield the distributed examples, each in four processes of torchrun."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    for text in EXAMPLES:
        yield Program(
            text.split()[0], (*torchrun, *text.split()), timeout_s=600, gives_up="Unable to locate sufficient"
        )


DEVICE = {
    "POLYXLA_EMULATE": "v5e-1",
    "PYTORCH_TESTING_DEVICE_ONLY_FOR": "tpu",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
SUITES = {
    "torch_xla": Suite(
        "torch_xla's own list of TPU tests on an emulated v4-8, each file in a process of its own.",
        "test/tpu/run_tests.sh of pytorch/xla at v2.9.0",
        "XLA",
        ("torch_xla",),
        torch_xla_tpu,
        {"POLYXLA_EMULATE": "v4-8"},
        ("test",),
    ),
    "torch_xla-replicas": Suite(
        "torch_xla's own tests of several replicas on an emulated v4-8, each file in a process of its own.",
        "`run_mp_op_tests` in test/run_tests.sh of pytorch/xla at v2.9.0",
        "XLA",
        ("torch_xla",),
        torch_xla_replicas,
        {"POLYXLA_EMULATE": "v4-8"},
        ("test",),
    ),
    "torch_xla-pallas": Suite(
        "torch_xla's own tests of Pallas kernels on an emulated v4-8.",
        "test/tpu/run_pallas_test.sh of pytorch/xla at v2.9.0",
        "XLA",
        ("torch_xla", "jax"),
        torch_xla_pallas,
        {"POLYXLA_EMULATE": "v4-8"},
        ("test",),
    ),
    "torch_xla-torch": Suite(
        "PyTorch's tests of the types of results, and of indexing, on torch_xla and an emulated v5e-1.",
        "test/test_type_promotion.py and test/test_indexing.py of PyTorch 2.6",
        "PYTORCH",
        ("torch_xla", "numpy"),
        types,
        DEVICE
        | {
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": "xla",
            "TORCH_TEST_DEVICES": str(CI / "torch_xla_device.py"),
        },
        ("test", str(CI)),
    ),
    "lightning": Suite(
        "The files of Lightning's and Fabric's tests that use a TPU, on an emulated v4-8.",
        "tests of Lightning-AI/pytorch-lightning at 2.6.5",
        "LIGHTNING",
        ("torch_xla", "lightning"),
        lightning,
        {"POLYXLA_EMULATE": "v4-8", "PL_RUN_TPU_TESTS": "1", "PJRT_DEVICE": "TPU"},
        ("tests", "tests/tests_pytorch", "tests/tests_fabric"),
    ),
    "operators": Suite(
        "PyTorch's comparison of its operators with the CPU and NumPy, on TorchTPU and an emulated v5e-1.",
        "a fourth of `test_compare_cpu` and `test_numpy_ref` in test/test_ops.py of PyTorch 2.6",
        "PYTORCH",
        ("torch_tpu", "numpy"),
        operators,
        DEVICE | {"PYTORCH_TEST_WITH_SLOW": "1"},
        ("test", str(CI)),
    ),
    "gradients": Suite(
        "A fixed sample of PyTorch's comparison of modules, also backward, with the CPU, and of operators in "
        "bfloat16 with NumPy, on TorchTPU and an emulated v5e-1.",
        "every fifth `test_cpu_gpu_parity` in test_modules.py, every 20th and 12th `reference_numerics` in "
        "bfloat16 in test_unary_ufuncs.py and test_binary_ufuncs.py in test of PyTorch 2.6",
        "PYTORCH",
        ("torch_tpu", "numpy"),
        gradients,
        DEVICE,
        ("test", str(CI)),
    ),
    "torch": Suite(
        "PyTorch's tests of indexing and views on TorchTPU and an emulated v5e-1.",
        "test/test_indexing.py and test/test_view_ops.py of PyTorch 2.6",
        "PYTORCH",
        ("torch_tpu", "numpy"),
        device_tests,
        DEVICE,
        ("test", str(CI)),
    ),
    "torch-sample": Suite(
        "A fixed sample of PyTorch's tests for every device, on TorchTPU and an emulated v5e-1.",
        "every N-th test of "
        + ", ".join(f"{file} ({count})" for file, count in SAMPLED.items())
        + " in test "
        "of PyTorch 2.6",
        "PYTORCH",
        ("torch_tpu", "numpy"),
        device_sample,
        DEVICE,
        ("test", str(CI)),
    ),
    "torchcts": Suite(
        f"Every {OPINFO_SHARE}th of the operators' tests, and every {TORCHCTS_SHARE}th of the others, of "
        "TorchCTS, a conformance suite for PyTorch's devices, that apply to what `.ci/torchcts_manifest` "
        "declares, on TorchTPU and an emulated v5e-1.",
        "the package torchcts 0.4.1, which needs no checkout",
        ".",
        ("torch_tpu", "torchcts", "numpy"),
        torchcts,
        # Without the second, each start asks a process for each capability.
        DEVICE | {"_TORCHCTS_SUBPROCESS": "1"},
        (str(CI / "torchcts_manifest"), str(CI)),
    ),
    "dtensor": torch_suite(
        "dtensor", "test/distributed/_tensor", "test_api.py", "test_dtensor.py", "test_redistribute.py"
    ),
    "fsdp2": torch_suite("fsdp2", "test/distributed/_composable/fsdp", "test_*.py"),
    "fsdp2-training": torch_suite(
        "fsdp2-training",
        "test/distributed/_composable/fsdp",
        "test_fully_shard_state_dict.py",
        "test_fully_shard_training.py",
    ),
    "tensor-parallel": torch_suite("tensor-parallel", "test/distributed/tensor/parallel", "test_*.py"),
    "device-mesh": torch_suite("device-mesh", "test/distributed", "test_device_mesh.py"),
    "dtensor-operators": torch_suite("dtensor-operators", "test/distributed/_tensor", "test_*_ops.py"),
    "dtensor-tools": torch_suite(
        "dtensor-tools",
        "test/distributed/_tensor",
        "test_attention.py",
        "test_common_rules.py",
        "test_init.py",
        "test_op*.py",
        "test_utils.py",
        "*/test_*.py",
    ),
    "checkpoint": torch_suite(
        "checkpoint",
        "test/distributed/checkpoint",
        "test_checkpoint.py",
        "test_dtensor_*.py",
        "test_file_system_checkpoint.py",
        "test_fsspec.py",
        "e2e/test_*.py",
        "fsdp/test_*.py",
    ),
    "pipelining": torch_suite("pipelining", "test/distributed/pipelining", "test_*.py"),
    "accelerate": Suite(
        "Accelerate's own test scripts on TorchTPU and an emulated v4-8, in two processes.",
        "src/accelerate/test_utils/scripts of huggingface/accelerate at v1.15.0",
        "ACCELERATE",
        ("torch_tpu", "accelerate"),
        accelerate,
        {"POLYXLA_EMULATE": "v4-8", "ACCELERATE_NUM_PROCESSES": "2"},
        ("src",),
    ),
    "accelerate-torch_xla": Suite(
        "Accelerate's own test scripts on torch_xla, an emulated v4-8 and an emulated v3-8, started by "
        "`accelerate launch --tpu`. `.ci/accelerate_checks.py` runs what is left of test_script.",
        "src/accelerate/test_utils/scripts and tests/test_tpu.py of huggingface/accelerate at v1.15.0",
        "ACCELERATE",
        ("torch_xla", "accelerate"),
        accelerate_torch_xla,
        {"OMP_NUM_THREADS": "1"},
        ("src",),
    ),
    "examples": Suite(
        "The distributed examples of PyTorch, unchanged, in four processes of torchrun on TorchTPU and an "
        "emulated v5e-4.",
        "distributed of pytorch/examples",
        "EXAMPLES",
        ("torch_tpu",),
        examples,
        {"POLYXLA_EMULATE": f"v5e-{CHIPS}", "OMP_NUM_THREADS": "1"},
        ("distributed",),
    ),
    "torchtitan": Suite(
        "torchtitan's llama3 debug model trains 10 steps in float32 on TorchTPU and an emulated v5e-4; its "
        "losses are those of processes on the CPU to 1e-5. `.ci/titan_on_tpu.py` has the needed patches.",
        "the package torchtitan 0.3.0, and the documentation of a checkout as text to train on",
        "TORCHTITAN",
        ("torch_tpu", "torchtitan"),
        torchtitan,
        {"POLYXLA_EMULATE": f"v5e-{CHIPS}"},
        # Not the checkout itself: its torchtitan may be another release than the package.
        ("tests/assets",),
    ),
}
"""By the name that a user gives."""
