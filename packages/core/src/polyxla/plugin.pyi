# The names of polyxla.plugin by topic. plugin.py imports a name from its module when it is first used.

# A type checker takes `x as x` for public by itself, and a new name only if it is listed.
__all__ = ["tpu_env"]

# Hooks and settings: what a plugin declares.
from polyxla.hookspecs import (
    PROJECT as PROJECT,
    hookspec as hookspec,
)
from polyxla.env import (
    POLYXLA_COMPILE_CACHE as POLYXLA_COMPILE_CACHE,
    POLYXLA_DEVICES as POLYXLA_DEVICES,
    POLYXLA_INPUT_TIMEOUT_S as POLYXLA_INPUT_TIMEOUT_S,
    POLYXLA_RUNTIME as POLYXLA_RUNTIME,
    POLYXLA_SECRET as POLYXLA_SECRET,
    POLYXLA_START_TIMEOUT_S as POLYXLA_START_TIMEOUT_S,
    POLYXLA_WAIT_S as POLYXLA_WAIT_S,
    LaunchSettings as LaunchSettings,
    Setting as Setting,
    from_environ as from_environ,
    snapshot as snapshot,
    temporary_environ as temporary_environ,
    timeout_s as timeout_s,
    update_environ as update_environ,
    working_directory as working_directory,
)
from polyxla.errors import (
    pip_install as pip_install,
)

# Contracts: what hooks take and return.
from polyxla.contracts.discovery import (
    Claim as Claim,
    Device as Device,
    Discovery as Discovery,
)
from polyxla.contracts.job import (
    Job as Job,
    ProcessMethod as ProcessMethod,
    ReplicaResult as ReplicaResult,
    StartMethod as StartMethod,
)
from polyxla.contracts.replication import (
    STEP_EVENT as STEP_EVENT,
    Counters as Counters,
    Counts as Counts,
    Memory as Memory,
    OnlyReplica as OnlyReplica,
    ReduceOp as ReduceOp,
    Replication as Replication,
    Sharding as Sharding,
    World as World,
    padded as padded,
    rendezvous_alone as rendezvous_alone,
    require_all as require_all,
)
from polyxla.contracts.precision import (
    Precision as Precision,
)

# Choosing a runtime and its devices.
from polyxla.plugin_manager import (
    HOOKSPECS as HOOKSPECS,
    PLUGINS as PLUGINS,
    RUNTIMES as RUNTIMES,
    constants as constants,
    find_runtime as find_runtime,
    load_everything as load_everything,
    load_plugins as load_plugins,
    load_runtime as load_runtime,
    plugin_problems as plugin_problems,
    unknown_variables as unknown_variables,
)
from polyxla.selection import (
    Candidate as Candidate,
    Selection as Selection,
    discover as discover,
    discover_all as discover_all,
    pick_devices as pick_devices,
    select as select,
)

# Launching: processes, their failures, and what they return.
from polyxla.launcher import (
    failures as failures,
    fork_server as fork_server,
)
from polyxla.launcher.processes import (
    refuse_inline as refuse_inline,
    run_inline as run_inline,
    run_processes as run_processes,
)
from polyxla.launcher.child import (
    REPLICA_THREAD as REPLICA_THREAD,
    end_process as end_process,
    on_interrupt as on_interrupt,
    remove_remote_modules as remove_remote_modules,
)
from polyxla.launcher.launch import (
    announce as announce,
    call_problem as call_problem,
    child_environment as child_environment,
    select_devices as select_devices,
)
from polyxla.launcher.start_methods import (
    running_fork_server as running_fork_server,
)
from polyxla.launcher.process_handle import (
    Exit as Exit,
    Process as Process,
    is_stopped as is_stopped,
    signal_name as signal_name,
)
from polyxla.launcher.messages import (
    Raised as Raised,
    RemoteTraceback as RemoteTraceback,
    Returned as Returned,
    dumps as dumps,
    pack as pack,
    unpack as unpack,
)
from polyxla.launcher.ports import (
    LOCALHOST as LOCALHOST,
    free_ports as free_ports,
)
from polyxla.private_files import (
    WHERE_PRIVATE as WHERE_PRIVATE,
    private_directory as private_directory,
    write_private as write_private,
)

# Replicas: collectives, loaders and trees of tensors.
from polyxla.replica import (
    random_state as random_state,
)
from polyxla.replica.collectives import (
    Collectives as Collectives,
)
from polyxla.replica.consistency import (
    average_gradients as average_gradients,
    average_in_place as average_in_place,
    broadcast as broadcast,
)
from polyxla.replica.loader import (
    Loader as Loader,
    count_records as count_records,
)
from polyxla.lazy_modules import keep_lazy_parameters as keep_lazy_parameters
from polyxla.replica.module_move import (
    hand_over as hand_over,
    move_module as move_module,
    optimizer_parameters as optimizer_parameters,
    parameters_of as parameters_of,
)
from polyxla.pytree import (
    is_tensor as is_tensor,
    leaves_with_paths as leaves_with_paths,
    map_tensors as map_tensors,
    tensors_in as tensors_in,
)

# Messages: what users read, and which of their lines it is about.
from polyxla import (
    callsite as callsite,
    env as env,
    presence as presence,
)
from polyxla.callsite import (
    BACKWARD as BACKWARD,
    LIBRARIES as LIBRARIES,
    caller as caller,
    location as location,
    own_packages as own_packages,
    short as short,
    user_line as user_line,
)
from polyxla.console import (
    drop_output as drop_output,
    ended_by_errors as ended_by_errors,
    printable as printable,
    say as say,
    say_once as say_once,
)
from polyxla.presence import (
    named as named,
)

# Commands.
from polyxla.cli import (
    script as script,
)
from polyxla.cli.output import (
    JsonFlag as JsonFlag,
    RuntimeOption as RuntimeOption,
    plain_errors as plain_errors,
    print_json as print_json,
    print_table as print_table,
)

# TPU hosts: types, topology, chips, emulation, and the processes of a job on them.
from polyxla.tpu import (
    env as tpu_env,
    torchrun as torchrun,
)
from polyxla.tpu.accelerators import (
    GENERATIONS as GENERATIONS,
    AcceleratorType as AcceleratorType,
    Bounds as Bounds,
    generation_of as generation_of,
)
from polyxla.tpu.parts import (
    ONE as ONE,
)
from polyxla.tpu.layout import (
    ChipPlan as ChipPlan,
    Layout as Layout,
    Place as Place,
    Plan as Plan,
    plan_chips as plan_chips,
)
from polyxla.tpu.chips import (
    GENERATION_BY_DEVICE as GENERATION_BY_DEVICE,
    PCI_ROOT as PCI_ROOT,
    AttachedChip as AttachedChip,
    attached_chips as attached_chips,
    may_have_chips as may_have_chips,
)
from polyxla.tpu.emulated import (
    POLYXLA_EMULATE_NUMERICS as POLYXLA_EMULATE_NUMERICS,
    POLYXLA_LIBTPU_HOST as POLYXLA_LIBTPU_HOST,
    POLYXLA_LIBTPU_SLICE as POLYXLA_LIBTPU_SLICE,
    POLYXLA_PJRT_PLUGIN as POLYXLA_PJRT_PLUGIN,
    EmulatedTpu as EmulatedTpu,
    check_device_variables as check_device_variables,
    free_addresses as free_addresses,
)
from polyxla.tpu.env import (
    POLYXLA_EMULATE as POLYXLA_EMULATE,
    TPU_LIBRARY_PATH as TPU_LIBRARY_PATH,
)
from polyxla.tpu.launching import (
    run_plan as run_plan,
    share_cores as share_cores,
)
from polyxla.tpu.monitor.replica_watch import (
    report_stalls as report_stalls,
    watch_replicas as watch_replicas,
)
from polyxla.tpu.chip_processes import (
    DEV as DEV,
    LOCK_FILE as LOCK_FILE,
    Holder as Holder,
    end_with_parent as end_with_parent,
    find_holders as find_holders,
    naming_holders as naming_holders,
    sigterm_ends_quietly as sigterm_ends_quietly,
)
from polyxla.tpu.secret import (
    SEAL_CHARS as SEAL_CHARS,
    derived as derived,
    sealed as sealed,
    shared_secret as shared_secret,
    unsealed as unsealed,
    with_secret as with_secret,
)
from polyxla.tpu.slices import (
    TpuSlice as TpuSlice,
    cores as cores,
    host_chips as host_chips,
    host_core as host_core,
    skip_metadata as skip_metadata,
    this_slice as this_slice,
)
from polyxla.tpu.topology import (
    BASE_PORT as BASE_PORT,
    host_environment as host_environment,
    join as join,
    process_environments as process_environments,
    single_core_environment as single_core_environment,
)
from polyxla.tpu.versions import (
    FOR_TORCH_TPU as FOR_TORCH_TPU,
    FOR_TORCH_XLA as FOR_TORCH_XLA,
    LibtpuReleases as LibtpuReleases,
    import_problem as import_problem,
)

# Runtimes on torch_xla.
from polyxla.xla.defects import (
    mend_torch_xla as mend_torch_xla,
)
from polyxla.xla import (
    first_device_use as first_device_use,
    refuse_if_device_in_use as refuse_if_device_in_use,
)
from polyxla.xla.input_watchdog import (
    InputWatchdog as InputWatchdog,
)
from polyxla.xla.optimizer_factors import (
    HALF_STEP as HALF_STEP,
    correction_is_one as correction_is_one,
)
from polyxla.xla.replication import (
    CollectiveReplication as CollectiveReplication,
    XlaReplication as XlaReplication,
    prepare_process as prepare_process,
    use_device as use_device,
)
from polyxla.xla.torch_xla_launch import (
    handle_launches as handle_launches,
)
