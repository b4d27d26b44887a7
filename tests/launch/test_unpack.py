"""The code arrives whole, whoever starts first, and becomes the command."""

import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launch.archive import make_archive
from launch.config.clusters import Code
from launch.job import ARCHIVE, UNPACK, Job
from launch.unpack import unpack
from tests.fleet import REPOSITORY
from tests.launch.hostile import VALUES, argument_printer, printed
from tests.launch.kinds import UNPACKER, contents
from train.cli.quoting import hydra_text


def place(folder: Path, packed: bytes) -> Path:
    """Put beside a submission what `job.command` names there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ARCHIVE).write_bytes(packed)
    shutil.copy(UNPACKER, folder / UNPACK)
    return folder


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **more}


def test_hostile_values_arrive_verbatim(checkout: Path, tmp_path: Path):
    stubs = tmp_path / "stubs"
    submission = place(tmp_path / "a submission", make_archive(checkout))
    argument_printer(stubs)
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    overrides = tuple(hydra_text("tracker.wandb.project", value) for value in VALUES)
    for each in (*((o,) for o in (overrides[0], *VALUES[-3:])), overrides):
        job = Job("name", "/runs/x", str(submission), each, "", "")
        _, *words = job.command("python", Code.archive)
        ran = subprocess.run(
            [sys.executable, *words], env=environment(tmp_path, PATH=path), cwd=stubs
        )
        assert ran.returncode == 0
        assert printed(stubs)[-1] == ["-P", "-m", "train", *each]


def run(submission: Path, tmp_path: Path, code: str, **more: str):
    command = [sys.executable, UNPACK, ARCHIVE, "--", sys.executable, "-P", "-c", code]
    return subprocess.Popen(
        command,
        cwd=submission,
        env=environment(tmp_path, **more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_command_finds_the_archives_code_first(checkout: Path, tmp_path: Path):
    submission = place(tmp_path / "submission", make_archive(checkout))
    other = tmp_path / "other"
    (other / "train").mkdir(parents=True)
    (other / "train/__init__.py").write_text("")
    (other / "train/step.py").write_text("new = 'of another program'\n")
    (other / "extra.py").write_text("")
    code = "import train.step, extra; print(train.step.new, train.step.__file__)"
    said, wrong = run(submission, tmp_path, code, PYTHONPATH=str(other)).communicate()
    sha = hashlib.sha256((submission / ARCHIVE).read_bytes()).hexdigest()
    folder = tmp_path / "cache/longhaul/code" / sha
    assert said.split() == ["2", str(folder / "train/step.py")], wrong


def test_signals_are_the_commands(checkout: Path, tmp_path: Path):
    submission = place(tmp_path / "submission", make_archive(checkout))
    wait = "import os, signal, sys, time; signal.signal(15, lambda *_: sys.exit(42)); "
    process = run(
        submission,
        tmp_path,
        # A signal that comes just before a sleep does not shorten it.
        wait + "print(os.getpid(), flush=1)\nfor _ in range(6000): time.sleep(0.01)",
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid  # it has become the command
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 42


def test_a_signal_on_the_way_is_a_preemption(tmp_path: Path):
    """There is nothing to save yet; 143 would count as a crash."""
    submission = place(tmp_path / "submission", b"")
    (submission / ARCHIVE).unlink()
    os.mkfifo(submission / ARCHIVE)  # an archive that is long in coming
    process = run(submission, tmp_path, "")
    with (submission / ARCHIVE).open("wb"):  # it reads by now
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 42


def test_several_at_once_and_one_killed_on_the_way(tmp_path: Path):
    """Whoever comes while others write, or after one was killed, has it whole."""
    packed = make_archive(REPOSITORY)
    whole = contents(packed)
    folder = tmp_path / hashlib.sha256(packed).hexdigest()
    submission = place(tmp_path / "submission", packed)
    code = f"""if True:
        import os, sys; sys.path.insert(0, {str(REPOSITORY)!r})
        from pathlib import Path; from launch.unpack import unpack
        put, left = Path.replace, int(sys.argv[1])
        def put_or_die(new, place):
            global left
            left -= 1
            return put(new, place) if left else os.kill(os.getpid(), 9)
        Path.replace = put_or_die
        packed = Path({str(submission / ARCHIVE)!r}).read_bytes()
        unpack(packed, Path({str(tmp_path)!r}))"""

    def start(dies_at: int = -1) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, str(dies_at)])

    def there() -> list[str]:
        """Name what can be seen; all of it must be whole at any time."""
        seen = [name for name in whole if (folder / name).exists()]
        for name in seen:
            assert (folder / name).read_bytes() == whole[name], name
        return seen

    assert start(dies_at=6).wait() == -signal.SIGKILL
    assert len(there()) == 5
    several = [start() for _ in range(4)]
    while any(process.poll() is None for process in several):
        there()
    assert [process.returncode for process in several] == [0] * 4
    assert len(there()) == len(whole)


def test_a_damaged_file_is_replaced(checkout: Path, tmp_path: Path):
    folder = unpack(make_archive(checkout), tmp_path)
    (folder / "train/step.py").write_text("damaged")
    (folder / "train/moe.py").unlink()
    unpack(make_archive(checkout), tmp_path)
    assert (folder / "train/step.py").read_text() == "new = 2\n"
    assert (folder / "train/moe.py").exists()


def packed_with(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type = kind
        member.linkname = "/etc/passwd"
        tar.addfile(member)
    return packed.getvalue()


@pytest.mark.parametrize(
    "packed",
    [
        packed_with("../outside.py"),
        packed_with("train/link.py", tarfile.SYMTYPE),
        b"no archive",
        make_archive(REPOSITORY)[:5000],
    ],
)
def test_nothing_is_run_from_a_strange_archive(packed: bytes, tmp_path: Path):
    submission = place(tmp_path / "submission", packed)
    process = run(submission, tmp_path, "print('ran')")
    said, wrong = process.communicate()
    assert process.returncode == 1
    assert said == ""
    assert "cannot be unpacked" in wrong
    assert "Traceback" not in wrong
    assert not [*tmp_path.rglob("*outside.py*"), *tmp_path.rglob("link.py")]


def test_without_a_home_it_is_a_new_folder(checkout: Path, tmp_path: Path):
    submission = place(tmp_path / "submission", make_archive(checkout))
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file/cache")
    code = "import train.step; print(train.step.__file__)"
    more = {"XDG_CACHE_HOME": nowhere, "TMPDIR": str(tmp_path)}
    said, wrong = run(submission, tmp_path, code, **more).communicate()
    folder = Path(said).relative_to(tmp_path).parts[0]
    assert folder.startswith("longhaul-code-"), wrong
    assert (tmp_path / folder).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("no-such-python", 127, "No such file or directory"),
        ("./not-executable", 126, "Permission denied"),
    ],
)
def test_a_command_that_cannot_be_executed_exits_as_from_a_shell(
    checkout: Path, tmp_path: Path, name: str, code: int, reason: str
):
    submission = place(tmp_path / "submission", make_archive(checkout))
    (submission / "not-executable").touch(mode=0o600)
    command = [sys.executable, UNPACK, ARCHIVE, "--", name]
    ran = subprocess.run(
        command,
        cwd=submission,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == code
    assert ran.stderr.endswith(f"{name}: {reason}\n")


def test_from_an_object_store(bucket, checkout: Path, tmp_path: Path):
    packed = make_archive(checkout)
    bucket.pipe("bucket/code/1/code.tar.gz", packed)
    code = "import train.step; print(train.step.__file__)"
    job = Job("x", "s3://bucket/code", "s3://bucket/code/1", (), "", "")
    words = job.command(sys.executable, Code.archive)
    said = subprocess.run(
        [*words[: words.index("--") + 1], sys.executable, "-P", "-c", code],
        env=environment(tmp_path, PYTHONPATH=str(REPOSITORY)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert hashlib.sha256(packed).hexdigest() in said.stdout, said.stderr
