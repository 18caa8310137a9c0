"""Official data sets from their addresses: fetched, checked, unpacked, and only then in place."""

import ftplib
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pooch

from embedder.errors import DatasetError

_CHUNK = 2**18
_FTP_TIMEOUT_S = 60
_SPARE = 1.1  # pictures unpack to about the size of their archive


@dataclass(frozen=True)
class Source:
    """An archive with a stable address.

    Args:
        name: of the data set.
        urls: addresses of the same file, tried in order.
        md5: of the file, as its authors or several independent users publish it.
        folder: what it unpacks to, and what `data.root` then names.
        gigabytes: size of the file.
        licence: what its authors ask.
    """

    name: str
    urls: tuple[str, ...]
    md5: str
    folder: str
    gigabytes: float
    licence: str

    @property
    def archive(self) -> str:
        """Name of the file."""
        return self.urls[0].rpartition("/")[2]


SOURCES: Mapping[str, Source] = {
    "cub": Source(
        name="CUB-200-2011",
        urls=("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",),
        md5="97eceeb196236b17998738112f37df78",
        folder="CUB_200_2011",
        gigabytes=1.15,
        licence="for non-commercial research and education",
    ),
    "aircraft": Source(
        name="FGVC-Aircraft",
        urls=(
            "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/"
            "fgvc-aircraft-2013b.tar.gz",
        ),
        md5="d4acdd33327262359767eeaa97a4f732",
        folder="fgvc-aircraft-2013b",
        gigabytes=2.75,
        licence="for non-commercial research",
    ),
    "sop": Source(
        name="Stanford Online Products",
        urls=(
            "http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
            "ftp://cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
        ),
        md5="7f73d41a2f44250d4779881525aea32e",
        folder="Stanford_Online_Products",
        gigabytes=3.08,
        licence="for research (https://cvgl.stanford.edu/projects/lifted_struct/)",
    ),
}

BY_HAND: Mapping[str, str] = {
    "cars196": """\
Cars196 has no stable address: the link of its authors
(https://ai.stanford.edu/~jkrause/cars/car_dataset.html) has been dead since 2023. You need the
release with all images in one folder, not the one divided into cars_train/ and cars_test/:

  cars_annos.mat    annotations of 16,185 images
  car_ims.tgz       the images

Ask the authors or a colleague for a copy. Several projects name
http://ftp.cs.stanford.edu/cs/cvgl/CARS196.zip; nobody publishes a checksum of it, so it is not
fetched here. Lay it out like this:

  {root}/cars196/cars_annos.mat
  {root}/cars196/car_ims/000001.jpg ... 016185.jpg

Then check it, and name it in your job as data.root with data.kind = "cars196":

  kinlens-train data doctor {root}/cars196""",
    "in_shop": """\
In-Shop Clothes Retrieval is given out by the authors of DeepFashion after an agreement, for
non-commercial research:

1. Open https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html and follow its
   download instructions: fill in the agreement and send it; the answer has the password of
   the archives that are locked.
2. From "In-shop Clothes Retrieval Benchmark" take these files (not img_highres.zip):

  Img/img.zip                     52,712 images of at most 256 px
  Eval/list_eval_partition.txt    train, query and gallery

3. Unpack img.zip, and lay them out like this (Anno/ instead of Eval/, and Img/img/ instead of
   img/, are read too):

  {root}/in_shop/Eval/list_eval_partition.txt
  {root}/in_shop/img/WOMEN/...   {root}/in_shop/img/MEN/...

4. Then check it, and name it in your job as data.root with data.kind = "in_shop":

  kinlens-train data doctor {root}/in_shop""",
}


def find_source(name: str) -> Source:
    """The source of a data set. Raises: DatasetError if there is none of that name."""
    if name not in SOURCES:
        raise DatasetError(
            f"No data set {name!r} is known. Give one of {', '.join((*SOURCES, *BY_HAND))}."
        )
    return SOURCES[name]


def obtain(
    source: Source,
    root: Path,
    url: str | None = None,
    keep_archive: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Path:
    """Put a data set into `root`, unless it is there; returns its folder.

    An archive that lies in `root` already is used. The folder appears when it is complete.

    Args:
        source: the data set.
        root: the folder that its folder is put into.
        url: another address of the same file.
        keep_archive: leave the archive in `root`.
        say: told what goes on, a sentence each.

    Raises: DatasetError.
    """
    folder, archive = root / source.folder, root / source.archive
    if folder.exists():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(
            f"{root} cannot be made: {error.strerror}. Choose another --root."
        ) from error
    _check_room(source, archive)
    if not archive.exists():
        say(f"{source.name} is fetched: {source.gigabytes:g} GB.")
        _fetch(source, (url,) if url else source.urls, archive)
    elif (found := pooch.file_hash(archive, "md5")) != source.md5:
        raise DatasetError(
            f"{archive} has MD5 {found}; that of {source.name} is {source.md5}. "
            "Delete it to download it again."
        )
    say(f"{source.name} is unpacked.")
    _unpack(archive, folder)
    if not keep_archive:
        archive.unlink()
    return folder


def _check_room(source: Source, archive: Path) -> None:
    needed = source.gigabytes * (_SPARE if archive.exists() else 1 + _SPARE)
    free = shutil.disk_usage(archive.parent).free / 1e9
    if free < needed:
        raise DatasetError(
            f"{archive.parent} has {free:.2f} GB free; {needed:.2f} GB are needed to download "
            f"and unpack {source.name}. Free space or choose another --root."
        )


def _fetch(source: Source, urls: tuple[str, ...], archive: Path) -> None:
    """Put the file of the first address that gives it at `archive`, whole and checked."""
    faults = []
    for url in urls:
        if url.startswith("ftp:"):
            downloader = pooch.FTPDownloader(
                timeout=_FTP_TIMEOUT_S, progressbar=True, chunk_size=_CHUNK
            )
        else:
            downloader = pooch.HTTPDownloader(
                progressbar=True,
                chunk_size=_CHUNK,
                headers={"Accept-Encoding": "identity"},
                hooks={"response": _as_stored},
            )
        try:
            known = f"md5:{source.md5}"
            pooch.retrieve(url, known, archive.name, archive.parent, downloader=downloader)
            return
        except (ValueError, OSError, EOFError, ftplib.Error) as error:
            faults.append(f"{url}: {error}")
    raise DatasetError(
        "\n".join(faults) + f"\n{source.name} could not be fetched. Check the network and the free "
        "space and run the command again; or pass --url with another address of the same file; or "
        f"fetch it in another way, such as curl -L -C - -o {archive} {urls[0]}, and run the "
        "command again: it uses the archive that lies there."
    )


def _as_stored(response: Any, *_: object, **__: object) -> None:
    """Servers that call a .tgz a compressed .tar would have it unpacked on the way."""
    response.raw.headers.pop("Content-Encoding", None)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack aside and rename: nothing leads out of the folder, and half of it is not seen."""
    aside = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as file:
                for name in file.namelist():
                    if not (aside / name).resolve().is_relative_to(aside.resolve()):
                        raise zipfile.BadZipFile(f"{name!r} leads out of the folder")
                for name in file.namelist():
                    file.extract(name, aside)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(aside, filter="data")
        if not (aside / folder.name).is_dir():
            raise tarfile.ReadError(f"it does not hold the folder {folder.name}")
        (aside / folder.name).rename(folder)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise DatasetError(
            f"{archive} cannot be unpacked: {error}. Free space or choose another --root; if it is "
            "not the archive of a data set, delete it and take another address."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
