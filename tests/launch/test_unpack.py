"""The code is unpacked completely by any process, which then becomes the command."""

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

from data.program import PREFIX, ROOT
from launch.archive import make_archive
from launch.config.clusters import Code
from launch.job import ARCHIVE, UNPACK, Job
from launch.unpack import unpack
from tests.fleet import REPOSITORY
from tests.launch.hostile import VALUES, argument_printer, printed
from tests.launch.kinds import UNPACKER, contents
from tests.program import PACKAGES_PATH, module_option, program_code
from train.cli.quoting import hydra_text

IMPORT_STEP = f"from {PREFIX}train import step"


def write_submission(folder: Path, packed: bytes) -> Path:
    """Write the files of a submission that `job.command` names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ARCHIVE).write_bytes(packed)
    shutil.copy(UNPACKER, folder / UNPACK)
    return folder


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **more}


def test_hostile_values_arrive_verbatim(checkout: Path, tmp_path: Path):
    stubs = tmp_path / "stubs"
    submission = write_submission(tmp_path / "a submission", make_archive(checkout))
    argument_printer(stubs)
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    overrides = tuple(hydra_text("tracker.wandb.project", value) for value in VALUES)
    for arguments in (*((o,) for o in (overrides[0], *VALUES[-3:])), overrides):
        job = Job("name", "/runs/x", str(submission), arguments, "", "")
        _, *words = job.command("python", Code.archive)
        process = subprocess.run(
            [sys.executable, *words], env=environment(tmp_path, PATH=path), cwd=stubs
        )
        assert process.returncode == 0
        assert printed(stubs)[-1] == ["-P", *module_option("train"), *arguments]


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
    submission = write_submission(tmp_path / "submission", make_archive(checkout))
    other_program = tmp_path / "other"
    train = other_program / PACKAGES_PATH / "train"
    train.mkdir(parents=True)
    (train / "__init__.py").write_text("")
    (train / "step.py").write_text("new = 'of another program'\n")
    (other_program / "extra.py").write_text("")
    code = f"{IMPORT_STEP}; import extra; print(step.new, step.__file__)"
    output, errors = run(
        submission, tmp_path, code, PYTHONPATH=str(other_program)
    ).communicate()
    sha = hashlib.sha256((submission / ARCHIVE).read_bytes()).hexdigest()
    folder = tmp_path / "cache/longhaul/code" / sha
    assert output.split() == ["2", f"{folder}/{PACKAGES_PATH}train/step.py"], errors


def test_the_command_receives_signals(checkout: Path, tmp_path: Path):
    submission = write_submission(tmp_path / "submission", make_archive(checkout))
    wait = "import os, signal, sys, time; signal.signal(15, lambda *_: sys.exit(42)); "
    process = run(
        submission,
        tmp_path,
        # The sleeps are short, as a signal just before one does not shorten it.
        wait + "print(os.getpid(), flush=1)\nfor _ in range(6000): time.sleep(0.01)",
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid  # it has become the command
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 42


def test_a_signal_during_unpacking_is_a_preemption(tmp_path: Path):
    """There is nothing to save yet; 143 would count as a crash."""
    submission = write_submission(tmp_path / "submission", b"")
    (submission / ARCHIVE).unlink()
    os.mkfifo(submission / ARCHIVE)  # an archive that arrives late
    process = run(submission, tmp_path, "")
    with (submission / ARCHIVE).open("wb"):  # the process reads by now
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 42


def test_concurrent_unpacking_with_one_killed_gives_complete_files(tmp_path: Path):
    """Every visible file is complete, while others write and after one was killed."""
    packed = make_archive(ROOT)
    files = contents(packed)
    folder = tmp_path / hashlib.sha256(packed).hexdigest()
    submission = write_submission(tmp_path / "submission", packed)
    code = program_code(f"""if True:
        import os, sys; sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path; from launch.unpack import unpack
        put, left = Path.replace, int(sys.argv[1])
        def put_or_die(new, place):
            global left
            left -= 1
            return put(new, place) if left else os.kill(os.getpid(), 9)
        Path.replace = put_or_die
        packed = Path({str(submission / ARCHIVE)!r}).read_bytes()
        unpack(packed, Path({str(tmp_path)!r}))""")

    def start(dies_at: int = -1) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, str(dies_at)])

    def visible_files() -> list[str]:
        """Return the names of the visible files, each of which must be complete."""
        names = [name for name in files if (folder / name).exists()]
        for name in names:
            assert (folder / name).read_bytes() == files[name], name
        return names

    assert start(dies_at=6).wait() == -signal.SIGKILL
    assert len(visible_files()) == 5
    processes = [start() for _ in range(4)]
    while any(process.poll() is None for process in processes):
        visible_files()
    assert [process.returncode for process in processes] == [0] * 4
    assert len(visible_files()) == len(files)


def test_a_damaged_file_is_replaced(checkout: Path, tmp_path: Path):
    folder = unpack(make_archive(checkout), tmp_path)
    train = folder / PACKAGES_PATH / "train"
    (train / "step.py").write_text("damaged")
    (train / "moe.py").unlink()
    unpack(make_archive(checkout), tmp_path)
    assert (train / "step.py").read_text() == "new = 2\n"
    assert (train / "moe.py").exists()


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
        make_archive(ROOT)[:5000],
    ],
)
def test_nothing_runs_from_an_invalid_archive(packed: bytes, tmp_path: Path):
    submission = write_submission(tmp_path / "submission", packed)
    process = run(submission, tmp_path, "print('ran')")
    output, errors = process.communicate()
    assert process.returncode == 1
    assert output == ""
    assert "cannot be unpacked" in errors
    assert "Traceback" not in errors
    assert not [*tmp_path.rglob("*outside.py*"), *tmp_path.rglob("link.py")]


def test_without_a_cache_the_code_goes_to_a_new_private_folder(
    checkout: Path, tmp_path: Path
):
    submission = write_submission(tmp_path / "submission", make_archive(checkout))
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file/cache")
    code = f"{IMPORT_STEP}; print(step.__file__)"
    more = {"XDG_CACHE_HOME": nowhere, "TMPDIR": str(tmp_path)}
    output, errors = run(submission, tmp_path, code, **more).communicate()
    folder = Path(output).relative_to(tmp_path).parts[0]
    assert folder.startswith("longhaul-code-"), errors
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
    submission = write_submission(tmp_path / "submission", make_archive(checkout))
    (submission / "not-executable").touch(mode=0o600)
    command = [sys.executable, UNPACK, ARCHIVE, "--", name]
    process = subprocess.run(
        command,
        cwd=submission,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert process.returncode == code
    assert process.stderr.endswith(f"{name}: {reason}\n")


def test_the_archive_is_read_from_an_object_store(
    bucket, checkout: Path, tmp_path: Path
):
    packed = make_archive(checkout)
    bucket.pipe("bucket/code/1/code.tar.gz", packed)
    code = f"{IMPORT_STEP}; print(step.__file__)"
    job = Job("x", "s3://bucket/code", "s3://bucket/code/1", (), "", "")
    words = job.command(sys.executable, Code.archive)
    process = subprocess.run(
        [*words[: words.index("--") + 1], sys.executable, "-P", "-c", code],
        env=environment(tmp_path, PYTHONPATH=str(REPOSITORY)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert hashlib.sha256(packed).hexdigest() in process.stdout, process.stderr
