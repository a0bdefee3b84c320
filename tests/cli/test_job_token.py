"""Workers do not get the job's token, and do not need it."""

from __future__ import annotations

import pytest

from helpers.jobs.agents import Hosts
from regrow.utils import PortReservation

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

SECRET = "a secret of this test, and of nobody else"
C10D = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT --node-rank"
# Shows what it inherits, uses the workers' store, and starts a job of its own with the others.
NESTED = """\
import subprocess
from regrow.store import worker_store
inherited = " ".join(os.environ.values())
print("the token is", "there" if "SECRET" in inherited or "job.token" in inherited else "gone")
with worker_store() as store:
    store.set(f"from {rank}", "here")
    store.wait([f"from {other}" for other in range(int(world))])
meet = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{sys.argv[1]}"]
command = [sys.executable, "-m", "regrow", "run", *meet, f"--node-rank={rank}", "--no-python"]
done = subprocess.run([*command, "true"], check=False)
print("the nested job ended with", done.returncode)
sys.stdout.flush()
""".replace("SECRET", SECRET)


@pytest.mark.parametrize("way", ["REGROW_TOKEN", "REGROW_TOKEN_FILE", "PET_RDZV_TOKEN_FILE"])
def test_workers_share_a_store_and_start_a_job_of_their_own_without_the_jobs_token(
    hosts: Hosts, way: str
) -> None:
    path = hosts.folder / "job.token"
    path.write_text(SECRET)
    path.chmod(0o600)
    environ = {way: SECRET if way == "REGROW_TOKEN" else str(path)}
    with PortReservation() as nested:
        agents = [
            hosts.start(f"{C10D} {rank}", NESTED, arguments=[str(nested.port)], **environ)
            for rank in (0, 1)
        ]
        ended = [hosts.ended(agent) for agent in agents]
    for code, output in ended:
        assert code == 0, output
        assert "the token is gone" in output
        assert "the nested job ended with 0" in output
