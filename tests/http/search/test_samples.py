"""Sample queries: a folder of the operator, asked for by number."""

from pathlib import Path

import pytest

from embedder.errors import SourceError
from service.api.pictures import MAX_SAMPLES
from tests.support.servers import StartService


def fill(folder: Path, pictures: list[bytes]) -> Path:
    folder.mkdir()
    for number, data in enumerate(pictures[:3]):
        (folder / f"{number}-shoe.png").write_bytes(data)
    (folder / "notes.txt").write_text("not a picture")
    return folder


def test_the_samples_of_the_folder_are_listed_and_can_be_searched_with(
    start_service: StartService, pictures: list[bytes], tmp_path: Path
) -> None:
    service = start_service(samples=fill(tmp_path / "samples", pictures))
    listed = service.client.get("/samples").json()["samples"]
    assert [sample["name"] for sample in listed] == ["0-shoe", "1-shoe", "2-shoe"]
    for number, sample in enumerate(listed):
        answer = service.client.get(sample["image"])
        assert answer.headers["content-type"] == "image/png"
        assert service.search(answer.content).json()["hits"][0]["id"] == number


def test_without_a_folder_there_are_none(start_service: StartService) -> None:
    service = start_service()
    assert service.client.get("/samples").json() == {"samples": []}
    assert service.client.get("/samples/0").status_code == 404


@pytest.mark.parametrize(("number", "status"), [("3", 404), ("-1", 422), ("9999", 422), ("x", 422)])
def test_a_number_that_is_none_is_refused(
    number: str, status: int, start_service: StartService, pictures: list[bytes], tmp_path: Path
) -> None:
    service = start_service(samples=fill(tmp_path / "samples", pictures))
    assert service.client.get(f"/samples/{number}").status_code == status


def test_a_file_that_is_gone_is_said_so(
    start_service: StartService, pictures: list[bytes], tmp_path: Path
) -> None:
    folder = fill(tmp_path / "samples", pictures)
    service = start_service(samples=folder)
    (folder / "1-shoe.png").unlink()
    answer = service.client.get("/samples/1")
    assert answer.status_code == 404
    assert "cannot be read any more" in answer.json()["detail"]


def test_a_missing_folder_is_named_with_its_cure(
    start_service: StartService, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=r"nowhere cannot be read.*--samples"):
        start_service(samples=tmp_path / "nowhere")


def test_there_is_a_bound(
    start_service: StartService, tmp_path: Path, pictures: list[bytes]
) -> None:
    for number in range(MAX_SAMPLES + 5):
        (tmp_path / f"{number:03d}.png").write_bytes(pictures[0])
    service = start_service(samples=tmp_path)
    assert len(service.client.get("/samples").json()["samples"]) == MAX_SAMPLES
