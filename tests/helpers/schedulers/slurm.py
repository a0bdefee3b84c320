"""A Slurm of four nodes on one machine: each node is a host of `netns`.

The controller runs on a fifth host. The processes of Slurm and munge run in the namespaces of these
hosts, on files below one folder. They find their configuration by SLURM_CONF alone. So clusters run
side by side and change nothing outside the folder. Every process of a cluster ends with its hosts,
also when the test is killed.

Each node has the 64 CPUs and 8 GPUs that the documented script requests. They exist only in the
configuration. regrow counts the GPUs of a library that replaces NVIDIA's driver (`fake_driver`).

Slurm's times are short where a test waits for them: a node that is silent for `SILENT_S` is down.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from helpers.hosts.netns import Host, Network
from helpers.processes import wait_until
from helpers.schedulers.training import (
    BATCH_SCRIPTS,
    PATIENCE_S,
    Training,
    introduce,
    is_about_losses,
    left_over,
    unwrapped,
)

(SCRIPT,) = BATCH_SCRIPTS
HALF = SCRIPT.replace("--nodes=4", "--nodes=2").replace("--nnodes 3:4", "--nnodes 1:2")
"""The documented script, and the same for half of the nodes."""
NODES = 4
GPUS = 2
"""GPUs that `--nproc-per-node gpu` finds on each node."""
RANKS = NODES * GPUS
"""Ranks of the documented script."""
SILENT_S = 10
KILL_WAIT_S = 10
"""Seconds between Slurm's SIGTERM and SIGKILL when it ends a job."""

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "cc")

_CONF = """
ClusterName=test
SlurmctldHost={control.name}({control.addr})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/run/slurmd.pid
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={silent_s}
KillWait={kill_wait_s}
MinJobAge=3600
MpiDefault=none
NodeName=node[1-4] NodeAddr={subnet}.[1-4] CPUs=64 RealMemory=1 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=node[1-4] Default=YES MaxTime=INFINITE State=UP {partition}
"""

_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = %d; return 0; }
"""


def fake_driver(folder: Path) -> None:
    """Create a libcuda.so.1 in the folder that reports `GPUS` GPUs."""
    source = folder / "cuda.c"
    source.write_text(_DRIVER % GPUS)
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)


class Cluster:
    """A running Slurm; a context manager that removes it at its end.

    Args:
        folder: an empty one for all its files; jobs are submitted in it and have it as home.
        partition: more settings of the only partition.
    """

    def __init__(self, folder: Path, partition: str = "") -> None:
        self.folder = folder
        self.network = Network()
        self.jobs: list[SlurmJob] = []
        try:
            self._start(partition)
        except BaseException:
            self.network.close()
            raise

    def _start(self, partition: str) -> None:
        folder = self.folder
        for name in ("state", "run"):
            (folder / name).mkdir()
        *self.nodes, self.control = [self.network.host() for _ in range(NODES + 1)]
        introduce([*self.nodes, self.control])
        conf = _CONF.format(
            folder=folder,
            control=self.control,
            subnet=self.control.addr.rpartition(".")[0],
            silent_s=SILENT_S,
            kill_wait_s=KILL_WAIT_S,
            partition=partition,
        )
        (folder / "slurm.conf").write_text(conf)
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o600)
        fake_driver(folder)
        scripts = Path(sys.executable).parent
        self.env = {
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder),  # for jobs without a log directory of their own
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "LD_LIBRARY_PATH": str(folder),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._munged = (
            f"mount -t tmpfs none {folder}/run && munged --force --socket={folder}/run/munge.socket"
            f" --key-file={folder}/munge.key --pid-file={folder}/run/munge.pid"
            f" --seed-file={folder}/run/munge.seed --log-file={folder}/munged-$(hostname).log"
        )
        self.control.run("sh", "-c", self._munged)
        self._daemon(self.control, "slurmctld", "-D", "-c")
        for node in self.nodes:
            self._boot(node)
        self.wait_until(
            lambda: self.call("sinfo -h -o '%D %T'").strip() == "4 idle", "four nodes idle"
        )

    def lose(self, node: Host) -> None:
        """Switch a node's power off."""
        node.lose_power()
        self.nodes.remove(node)

    def restore(self, node: Host) -> None:
        """Switch the power of a lost node on again."""
        restored = self.network.restore(node)
        introduce([*self.nodes, restored, self.control])
        self._boot(restored)
        self.nodes.insert(restored.port - 1, restored)

    def _boot(self, node: Host) -> None:
        node.run("sh", "-c", self._munged)
        self._daemon(node, "slurmd", "-D", "-N", node.name)

    def _daemon(self, host: Host, *command: str) -> None:
        with (self.folder / f"{command[0]}-{host.name}.output").open("ab") as output:
            host.popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.env
            )

    def call(self, command: str, folder: Path | None = None) -> str:
        """Return the output of a shell command on the controller's host."""
        run = ["bash", "-c", f"cd {folder or self.folder}; {command}"]
        process = self.control.popen(
            run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.env, text=True
        )
        output, _ = process.communicate(timeout=PATIENCE_S)
        return str(output)

    def submit(self, script: str, *flags: str, folder: Path | None = None) -> SlurmJob:
        """Submit a batch script, with more flags of sbatch."""
        return self._submitted(self._sbatch(script, flags, folder or self.folder), folder)

    def submit_array(self, script: str, tasks: int) -> list[SlurmJob]:
        """Submit a batch script as an array of `tasks` jobs."""
        number = self._sbatch(script, (f"--array=0-{tasks - 1}",), self.folder)
        return [self._submitted(f"{number}_{task}") for task in range(tasks)]

    def _sbatch(self, script: str, flags: tuple[str, ...], folder: Path) -> str:
        (folder / "script.sh").write_text(script)
        output = self.call(f"sbatch --parsable {' '.join(flags)} script.sh", folder).strip()
        assert output.isdecimal(), output
        return output

    def _submitted(self, name: str, folder: Path | None = None) -> SlurmJob:
        job = SlurmJob(self, name, folder or self.folder)
        self.jobs.append(job)
        return job

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition is true, for at most `PATIENCE_S`."""
        wait_until(condition, lambda: f"{what}; {self.report()}", PATIENCE_S, pause=0.1)

    def left_over(self) -> list[str]:
        """Return the processes on nodes that belong to a job."""
        return left_over(self.nodes)

    def report(self) -> str:
        """Return the state of the cluster, for a test that fails."""
        queue = self.call("squeue; sinfo -N -l")
        jobs = "\n".join(f"{job.name}: {job.facts}\n{job.output}" for job in self.jobs)
        log = self.folder / "slurmctld.log"
        return f"{queue}\n{jobs}\n{log.read_text()[-4000:] if log.exists() else ''}"

    def close(self) -> None:
        """Remove the cluster."""
        self.network.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SlurmJob:
    """A submitted job.

    Args:
        cluster: the cluster that runs it.
        name: its id; ID_TASK for a task of an array.
        folder: directory in which it was submitted.
    """

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self.cluster = cluster
        self.name = name
        self.folder = folder
        self.training = Training(folder / f"job-{name}", cluster.report)

    @property
    def facts(self) -> dict[str, str]:
        """Return the fields that `scontrol show job` prints."""
        output = self.cluster.call(f"scontrol show job -o {self.name}")
        return dict(re.findall(r"(\w+)=(\S*)", output))

    @property
    def state(self) -> str:
        """Return Slurm's name for its state."""
        return self.facts.get("JobState", "")

    @property
    def output(self) -> str:
        """Return the output of the script and its tasks."""
        path = self.folder / f"slurm-{self.name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def becomes(self, *states: str) -> None:
        """Wait until the job has one of these states."""
        self.cluster.wait_until(
            lambda: self.state in states, f"job {self.name} is {' or '.join(states)}"
        )

    def ends(self, state: str, exit_code: str = "0:0") -> None:
        """Wait for the end of the job's run, and until none of its processes is left on any node.

        Args:
            state: Slurm's name for the expected end.
            exit_code: of its script, and the signal that killed it.
        """
        self.becomes("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "PENDING")
        self.leaves_nothing()
        facts = self.facts
        assert (facts["JobState"], facts["ExitCode"]) == (state, exit_code), self.cluster.report()

    def leaves_nothing(self) -> None:
        """Wait until no process of a job is left on any node."""
        self.cluster.wait_until(
            lambda: not self.cluster.left_over(), f"nothing is left of {self.name}"
        )

    def lines(self, *, of_slurm: bool = False) -> list[str]:
        """Return the output lines of regrow, or those of Slurm.

        The line that says which hosts may be lost does not count: a short job may end before it.
        """
        lines = [line for line in unwrapped(self.output) if not is_about_losses(line)]
        return [line for line in lines if line.startswith(("srun: ", "slurmstepd")) == of_slurm]

    def start_soon(self) -> None:
        """Let Slurm start a requeued job within seconds, instead of its two minutes.

        A job fails at once if it starts within the second in which its last run ended.
        """
        idle = f"{NODES} idle"
        self.cluster.wait_until(
            lambda: self.cluster.call("sinfo -h -o '%D %T'").strip() == idle, idle
        )
        self.cluster.call(f"scontrol update JobId={self.name} StartTime=now+3")
