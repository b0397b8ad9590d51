"""URLs, checksums and constants of the data sets."""

from __future__ import annotations

from dataclasses import dataclass

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True)
class File:
    """One official file: its URL, its size in bytes, and its checksum as `algorithm:digest`."""

    name: str
    url: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Source:
    """An image data set: its files, in the order train images, train labels, test images, test labels for idx."""

    folder: str
    files: tuple[File, ...]
    licence: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]


def _idx(base: str, sizes: tuple[int, ...], digests: tuple[str, ...]) -> tuple[File, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        File(f"{name}-ubyte.gz", f"{base}{name}-ubyte.gz", size, f"sha256:{digest}")
        for name, size, digest in zip(names, sizes, digests, strict=True)
    )


SOURCES = {
    "mnist": Source(
        "mnist",
        _idx(
            MNIST_URL,
            (9912422, 28881, 1648877, 4542),
            (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        "CC BY-SA 3.0",
        (0.1307,),
        (0.3081,),
        tuple("0123456789"),
    ),
    "fashion-mnist": Source(
        "fashion-mnist",
        _idx(
            FASHION_URL,
            (26421880, 29515, 4422102, 5148),
            (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        "MIT",
        (0.2860,),
        (0.3530,),
        ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    "cifar10": Source(
        "cifar10",
        (
            File(
                "cifar-10-binary.tar.gz",
                f"{CIFAR_URL}cifar-10-binary.tar.gz",
                170052171,
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        "no licence stated; cite Krizhevsky 2009",
        (0.4914, 0.4822, 0.4465),
        (0.2023, 0.1994, 0.2010),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
}

# The members of the official archives. The binary test batch has no published checksum: unpacked from the archive it is
# covered by the archive's checksum, without the archive it counts as unverified.
CIFAR_BINARY = {
    "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "",
}
# A copy of the test batch that is known to differ from the official one, and the images that differ: 19 ships and a
# horse that are available as JPEG only. They are left out of the test data.
CIFAR_INEXACT = {
    "sha256:123ca0dad8f960344d9149742165d4215093c84c8c4bdc5922af93b614bdb501": (
        *(1259, 1369, 1422, 2245, 2737, 2935, 3695, 3718, 4085, 4496),
        *(5791, 5896, 6286, 7580, 7707, 7724, 7832, 8117, 8551, 9254),
    )
}
CIFAR_PYTHON = {
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}
