"""The pages are correct: links have targets, commands and Python blocks run."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.certificates import self_signed
from helpers.commands import ROOT, Ended, run
from helpers.pages import PAGES, TRAIN, blocks, commands, typed
from helpers.rendezvous.etcd_server import etcd, require_etcd
from helpers.schedulers.training import COMMANDS as UNDER_SCHEDULERS
from regrow.utils import PortReservation

_HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
EXAMPLE: re.Pattern[str] = _HOOKS["EXAMPLE"]
on_page_markdown: Callable[[str], str] = _HOOKS["on_page_markdown"]

# --- links


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as Markdown and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    named = {name for heading in headings for name in re.findall(r"\{ #(\S+) \}", heading)}
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return named | {re.sub(r"[\s-]+", "-", heading) for heading in plain}


def links(pages: dict[str, str] = PAGES) -> Iterator[tuple[str, str]]:
    for page, text in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith("https://"):
                yield page, target


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    found = list(links())
    assert len(found) > 100
    for page, target in found:
        file, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert path.exists(), (page, target)
        assert not anchor or anchor in anchors(path.read_text()), (page, target)


def test_no_page_of_the_site_links_to_a_file_outside_of_it() -> None:
    of_site = {page: text for page, text in PAGES.items() if page.startswith("docs/")}
    for page, target in links({page: EXAMPLE.sub("", text) for page, text in of_site.items()}):
        path = ((ROOT / page).parent / target.partition("#")[0]).resolve()
        assert path.is_relative_to(ROOT / "docs"), (page, target)


def test_the_examples_and_help_texts_are_inserted_into_the_pages_of_the_site() -> None:
    assert not [page for page, text in PAGES.items() if "{{" in text]
    for page, file in (("examples.md", "gpt.py"), ("guides/frameworks.md", "lightning_digits.py")):
        made = on_page_markdown(PAGES[f"docs/{page}"])
        (source,) = (ROOT / "examples").rglob(file)
        assert f"```python\n{source.read_text()}```" in made
    made = on_page_markdown("### `regrow token`\n\n`regrow token --help`\n")
    assert made.startswith("### `regrow token`\n\n```text\nusage: regrow token ")


# --- commands

ALONE = re.compile(r"regrow (run --standalone|events|goodput) ")
SEVERAL = re.compile(r"regrow run .*--nnodes")
ELSEWHERE = {
    # run word for word by tests/schedulers
    *(command for command in UNDER_SCHEDULERS if command.startswith("mpirun")),
    # by tests/docs/test_readme.py, and before this test can run
    *(c for c in commands("README.md") if c.startswith(("make ", "pip ", "srun ", "regrow token"))),
    # by tests/docs/test_stopping_page.py
    *(c for c in commands("docs/guides/stopping.md") if c.startswith("regrow stop ")),
    # by tests/inprocess/test_under_mpirun.py
    *(
        command
        for command in commands("docs/guides/in-process-restart.md")
        if command.startswith(("export MASTER_ADDR=", "srun ", "mpirun "))
    ),
    # by tests/docs/test_explain_page.py
    *commands("docs/guides/explain.md"),
    # by tests/integrations/test_frameworks.py
    *commands("docs/guides/frameworks.md"),
    # by tests/views/test_watching_page.py and tests/views/test_remote_job.py
    *(c for c in commands("docs/guides/watching.md") if c.startswith(("regrow top", "regrow web"))),
    # below, with an etcd
    *(command for command in commands("docs/guides/etcd.md") if command.startswith("etcdctl ")),
}


def test_every_command_is_run_by_a_test() -> None:
    for command in commands():
        assert command in ELSEWHERE or ALONE.match(command) or SEVERAL.match(command), command


def pages_with(kind: re.Pattern[str]) -> list[str]:
    return [page for page in PAGES if any(map(kind.match, {*commands(page)} - ELSEWHERE))]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", pages_with(ALONE))
def test_the_commands_of_one_host_run(page: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    alone = [command for command in commands(page) if ALONE.match(command)]
    if not any("--log-dir runs" in command for command in alone):
        alone.insert(0, "regrow run --standalone --log-dir runs train.py")  # a job for the story
    for command in alone:
        ended = typed(command, tmp_path)
        assert ended.code == 0, f"{command}\n{ended.output}"
        expected = {"events": "SUCCEEDED", "goodput": "goodput"}
        assert expected.get(command.split()[1], "hello from rank 0 of ") in ended.output, command


def several() -> list[str]:
    return sorted({command for command in commands() if SEVERAL.match(command)})


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", several())
def test_a_command_for_several_hosts_makes_one_job_of_them(command: str, tmp_path: Path) -> None:
    """Run one agent with one worker for each host, all on this host."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "shared" / "rendezvous").mkdir(parents=True)
    most = int(re.search(r"--nnodes (?:\d+:)?(\d+)", command)[1])  # type: ignore[index]
    command = command.replace("per-node 8", "per-node 1").replace("/shared/", f"{tmp_path}/shared/")
    assert typed("regrow token ~/job.token", tmp_path) == Ended(0, "")
    certificate = self_signed(tmp_path, "IP:127.0.0.1")
    for name, path in {
        "ca.pem": certificate.cafile,
        "host.pem": certificate.certfile,
        "host.key": certificate.keyfile,
    }.items():
        assert path is not None
        shutil.copy(path, tmp_path / name)
        (tmp_path / name).chmod(0o600)
    with PortReservation() as reserved, ThreadPoolExecutor(most) as agents:
        place = f"127.0.0.1:{reserved.port}"
        line = re.sub(r"node0(?::29400)?(?:,node\d)*(?= )", place, command, count=1)
        if "--rdzv-backend etcd" in line:
            require_etcd()
            with etcd() as cluster:
                line = line.replace("etcd0,etcd1,etcd2", cluster.endpoint)
                ended = list(agents.map(lambda _: typed(line, tmp_path), range(most)))
        else:
            ended = list(agents.map(lambda _: typed(line, tmp_path), range(most)))
    assert [each.code for each in ended] == [0] * most, ended
    output = "".join(each.output for each in ended)
    hello = sorted(re.findall(r"hello from rank (\d+) of (\d+)", output))
    assert hello == [(str(rank), str(most)) for rank in range(most)]


def test_the_role_for_etcd_is_made_by_the_commands_of_its_page() -> None:
    require_etcd()
    with etcd() as cluster:

        def etcdctl(line: str) -> Ended:
            tool, *words = shlex.split(line)
            return run([tool, f"--endpoints={cluster.endpoint}", *words])

        assert etcdctl("etcdctl user add trainer --no-password").code == 0
        lines = [c for c in commands("docs/guides/etcd.md") if c.startswith("etcdctl ")]
        assert len(lines) == 3
        for line in lines:
            ended = etcdctl(line)
            assert ended.code == 0, (line, ended)
        assert "/torch/elastic/rendezvous/" in etcdctl("etcdctl role get regrow").output


# --- Python

LOOP = "batches = range(3)\ndef train_step(batch): pass\n"
PHASES = (
    "resumed, last_step = 0, 100\nbatches = iter(range(1000))\n"
    "def load_checkpoint(): pass\ndef save_checkpoint(step): pass\ndef train_step(batch): pass\n"
)
ASYNC = "import asyncio, regrow\nasync def reply(): pass\n"
GLOO = (
    "import os, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\ndist.barrier()\n"  # a rank that ends closes its connections
)
STORE = (
    "import os, torch.distributed as dist\n"
    "from regrow.store import worker_store\nfrom regrow.store.torch import TorchStore\n"
)
#: Stands for an engine of DeepSpeed, which needs a GPU; a step is two batches.
ENGINE = """\
import regrow
loader, folder = range(240), "checkpoints"
class Engine:
    global_steps = batches = saved = 0
    def __call__(self, batch): return batch
    def load_checkpoint(self, folder): return None, None
    def save_checkpoint(self, folder):
        assert (self.global_steps, self.batches, self.saved) == (100, 200, 0)
        self.saved = 1
    def backward(self, loss): pass
    def step(self):
        self.batches += 1
        self.global_steps = self.batches // 2
engine = Engine()
"""
#: Code to run before each block, flags of its job ("": it runs alone), and its output.
PYTHON: dict[tuple[str, int], tuple[str, str, str]] = {
    ("docs/getting-started.md", 0): ("", "--nproc-per-node 2", "hello from rank 1 of 2"),
    ("docs/getting-started.md", 1): ("", "--nproc-per-node 2", ""),
    ("docs/guides/timers.md", 0): (LOOP, "--nproc-per-node 2 --timers", ""),
    ("docs/guides/timers.md", 1): (LOOP + ASYNC, "--nproc-per-node 2 --timers", ""),
    ("docs/guides/timers.md", 2): ("", "--nproc-per-node 2 --timers", ""),
    ("docs/guides/timers.md", 3): ("", "", "exit code -9"),
    ("docs/guides/timers.md", 4): ("", "", "exit code -9"),
    ("docs/guides/heartbeats.md", 0): (LOOP, "--nproc-per-node 2", ""),
    ("docs/guides/goodput.md", 0): (PHASES, "--nproc-per-node 2", ""),
    ("docs/guides/frameworks.md", 0): (ENGINE, "--nproc-per-node 2", ""),
    ("docs/guides/from-nvidia-resiliency-ext.md", 0): ("", "--nproc-per-node 2", ""),
}
#: The same for blocks that load torch.
TRAINING: dict[tuple[str, int], tuple[str, str, str]] = {
    ("docs/guides/heartbeats.md", 1): (GLOO, "--nproc-per-node 2", ""),
    ("docs/guides/in-process-restart.md", 0): ("", "--nproc-per-node 2", ""),
    ("docs/guides/replace.md", 0): ("", "--nproc-per-node 2", ""),
    ("docs/guides/elastic-in-place.md", 0): ("", "--nproc-per-node 2", ""),
    ("docs/guides/state.md", 0): ("", "--nproc-per-node 2", ""),
    ("docs/architecture.md", 0): (STORE, "--nproc-per-node 2", ""),
}
#: Its job fails, with this in the report.
FAILING = {("docs/guides/one-host.md", 0): "RuntimeError: this message is in the report"}


def run_block(page: str, number: int, before: str, flags: str, folder: Path) -> Ended:
    text = next(b.text for b in blocks("python", page) if b.number == number)
    if re.search(r"^async with ", text, re.M):
        text = f"async def main():\n{textwrap.indent(text, '    ')}\nasyncio.run(main())\n"
    (folder / "train.py").write_text(before + text)
    if not flags:
        return run([sys.executable, "train.py"], cwd=folder)
    return typed(f"regrow run --standalone {flags} train.py", folder)


def test_every_block_of_python_is_run_by_a_test() -> None:
    found = {(block.page, block.number) for block in blocks("python")}
    found.remove(("docs/guides/stopping.md", 0))  # by tests/docs/test_stopping_page.py
    assert found == PYTHON.keys() | TRAINING.keys() | FAILING.keys()


@pytest.mark.parametrize(("page", "number"), PYTHON)
def test_a_block_of_python_runs(page: str, number: int, tmp_path: Path) -> None:
    before, flags, output = PYTHON[page, number]
    ended = run_block(page, number, before, flags, tmp_path)
    assert ended.code == 0, ended.output
    assert output in ended.output


@pytest.mark.training
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("page", "number"), TRAINING)
def test_a_block_of_python_that_loads_torch_runs(page: str, number: int, tmp_path: Path) -> None:
    before, flags, _ = TRAINING[page, number]
    ended = run_block(page, number, before, flags, tmp_path)
    assert ended.code == 0, ended.output


@pytest.mark.parametrize(("page", "number"), FAILING)
def test_a_block_of_python_fails_as_its_page_says(page: str, number: int, tmp_path: Path) -> None:
    ended = run_block(page, number, "", "--nproc-per-node 2 --log-dir runs", tmp_path)
    assert ended.code == 1, ended.output
    assert FAILING[page, number] in ended.output
