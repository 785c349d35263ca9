import pytest

from contracts import BadInput
from envs.assets import SUBFOLDERS, describe_assets, find_assets


@pytest.fixture
def folder(tmp_path):
    for name in SUBFOLDERS:
        (tmp_path / "assets" / name).mkdir(parents=True)
    return tmp_path / "assets"


def test_default_is_the_bundled_pack():
    pack = find_assets("lowpoly")
    assert pack.is_absolute()
    assert all((pack / name).is_dir() for name in SUBFOLDERS)
    assert "low-poly" in describe_assets("lowpoly")


def test_a_folder_is_used_and_named_and_a_wrong_one_refused_with_what_it_lacks(folder, tmp_path):
    assert find_assets(str(folder)) == folder
    assert str(folder) in describe_assets(str(folder))
    (folder / "scenes").rmdir()
    with pytest.raises(BadInput, match="lacks scenes"):
        find_assets(str(folder))
    with pytest.raises(BadInput, match="does not exist"):
        find_assets(str(tmp_path / "none"))


def test_official_assets_in_hf_liberos_cache_are_used(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache" / "libero").mkdir(parents=True)
    folder.rename(tmp_path / ".cache" / "libero" / "assets")
    assert find_assets("official") == tmp_path / ".cache" / "libero" / "assets"


def test_official_assets_without_network_are_one_line_of_advice(monkeypatch, tmp_path):
    import huggingface_hub

    def offline(**arguments):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BadInput, match=r"ConnectionError.*lowpoly") as refusal:
        find_assets("official")
    assert "\n" not in str(refusal.value)
