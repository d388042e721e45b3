"""The types of slices. Expected values were copied by hand from the Cloud TPU documentation."""

from __future__ import annotations

import pytest

from polyxla.errors import UsageError
from polyxla.tpu.accelerators import GENERATIONS, AcceleratorType, Bounds, most_cubic, parse_shape, sizes

# type, generation, chips, hosts, chips per host, threads per process, devices, hosts' and chips' arrangement
TABLE = [
    ("v2-8", "v2", 4, 1, 4, 2, 8, (1, 1, 1), (2, 2, 1)),
    ("v2-32", "v2", 16, 4, 4, 2, 32, (2, 2, 1), (2, 2, 1)),
    ("v2-128", "v2", 64, 16, 4, 2, 128, (4, 4, 1), (2, 2, 1)),
    ("v2-256", "v2", 128, 32, 4, 2, 256, (4, 8, 1), (2, 2, 1)),
    ("v2-512", "v2", 256, 64, 4, 2, 512, (8, 8, 1), (2, 2, 1)),
    ("v3-8", "v3", 4, 1, 4, 2, 8, (1, 1, 1), (2, 2, 1)),
    ("v3-32", "v3", 16, 4, 4, 2, 32, (2, 2, 1), (2, 2, 1)),
    ("v3-64", "v3", 32, 8, 4, 2, 64, (2, 4, 1), (2, 2, 1)),
    ("v3-128", "v3", 64, 16, 4, 2, 128, (4, 4, 1), (2, 2, 1)),
    ("v3-256", "v3", 128, 32, 4, 2, 256, (4, 8, 1), (2, 2, 1)),
    ("v3-512", "v3", 256, 64, 4, 2, 512, (8, 8, 1), (2, 2, 1)),
    ("v3-1024", "v3", 512, 128, 4, 2, 1024, (8, 16, 1), (2, 2, 1)),
    ("v3-2048", "v3", 1024, 256, 4, 2, 2048, (16, 16, 1), (2, 2, 1)),
    ("v4-8", "v4", 4, 1, 4, 1, 4, (1, 1, 1), (2, 2, 1)),
    ("v4-16", "v4", 8, 2, 4, 1, 8, (1, 1, 2), (2, 2, 1)),
    ("v4-32", "v4", 16, 4, 4, 1, 16, (1, 1, 4), (2, 2, 1)),
    ("v4-64", "v4", 32, 8, 4, 1, 32, (1, 2, 4), (2, 2, 1)),
    ("v4-128", "v4", 64, 16, 4, 1, 64, (2, 2, 4), (2, 2, 1)),
    ("v4-256", "v4", 128, 32, 4, 1, 128, (2, 2, 8), (2, 2, 1)),
    ("v4-384", "v4", 192, 48, 4, 1, 192, (2, 2, 12), (2, 2, 1)),
    ("v4-512", "v4", 256, 64, 4, 1, 256, (2, 4, 8), (2, 2, 1)),
    ("v4-1024", "v4", 512, 128, 4, 1, 512, (4, 4, 8), (2, 2, 1)),
    ("v4-1536", "v4", 768, 192, 4, 1, 768, (4, 4, 12), (2, 2, 1)),
    ("v4-2048", "v4", 1024, 256, 4, 1, 1024, (4, 4, 16), (2, 2, 1)),
    ("v4-4096", "v4", 2048, 512, 4, 1, 2048, (4, 8, 16), (2, 2, 1)),
    ("v5litepod-1", "v5e", 1, 1, 1, 1, 1, (1, 1, 1), (1, 1, 1)),
    ("v5litepod-4", "v5e", 4, 1, 4, 1, 4, (1, 1, 1), (2, 2, 1)),
    ("v5litepod-8", "v5e", 8, 1, 8, 1, 8, (1, 1, 1), (2, 4, 1)),
    ("v5litepod-16", "v5e", 16, 4, 4, 1, 16, (2, 2, 1), (2, 2, 1)),
    ("v5litepod-32", "v5e", 32, 8, 4, 1, 32, (2, 4, 1), (2, 2, 1)),
    ("v5litepod-64", "v5e", 64, 16, 4, 1, 64, (4, 4, 1), (2, 2, 1)),
    ("v5litepod-128", "v5e", 128, 32, 4, 1, 128, (4, 8, 1), (2, 2, 1)),
    ("v5litepod-256", "v5e", 256, 64, 4, 1, 256, (8, 8, 1), (2, 2, 1)),
    ("v5p-8", "v5p", 4, 1, 4, 1, 4, (1, 1, 1), (2, 2, 1)),
    ("v5p-16", "v5p", 8, 2, 4, 1, 8, (1, 1, 2), (2, 2, 1)),
    ("v5p-32", "v5p", 16, 4, 4, 1, 16, (1, 1, 4), (2, 2, 1)),
    ("v5p-64", "v5p", 32, 8, 4, 1, 32, (1, 2, 4), (2, 2, 1)),
    ("v5p-128", "v5p", 64, 16, 4, 1, 64, (2, 2, 4), (2, 2, 1)),
    ("v5p-512", "v5p", 256, 64, 4, 1, 256, (2, 4, 8), (2, 2, 1)),
    ("v5p-8192", "v5p", 4096, 1024, 4, 1, 4096, (8, 8, 16), (2, 2, 1)),
    ("v5p-12288", "v5p", 6144, 1536, 4, 1, 6144, (8, 8, 24), (2, 2, 1)),
    ("v6e-1", "v6e", 1, 1, 1, 1, 1, (1, 1, 1), (1, 1, 1)),
    ("v6e-4", "v6e", 4, 1, 4, 1, 4, (1, 1, 1), (2, 2, 1)),
    ("v6e-8", "v6e", 8, 1, 8, 1, 8, (1, 1, 1), (2, 4, 1)),
    ("v6e-16", "v6e", 16, 4, 4, 1, 16, (2, 2, 1), (2, 2, 1)),
    ("v6e-32", "v6e", 32, 8, 4, 1, 32, (2, 4, 1), (2, 2, 1)),
    ("v6e-64", "v6e", 64, 16, 4, 1, 64, (4, 4, 1), (2, 2, 1)),
    ("v6e-128", "v6e", 128, 32, 4, 1, 128, (4, 8, 1), (2, 2, 1)),
    ("v6e-256", "v6e", 256, 64, 4, 1, 256, (8, 8, 1), (2, 2, 1)),
    # The bounds of tpu7x are those in the tests of GKE's device plugin.
    ("tpu7x-2", "v7x", 1, 1, 1, 2, 2, (1, 1, 1), (1, 1, 1)),
    ("tpu7x-8", "v7x", 4, 1, 4, 2, 8, (1, 1, 1), (2, 2, 1)),
    ("tpu7x-16", "v7x", 8, 2, 4, 2, 16, (1, 1, 2), (2, 2, 1)),
    ("tpu7x-64", "v7x", 32, 8, 4, 2, 64, (1, 2, 4), (2, 2, 1)),
    ("tpu7x-128", "v7x", 64, 16, 4, 2, 128, (2, 2, 4), (2, 2, 1)),
    ("tpu7x-13824", "v7x", 6912, 1728, 4, 2, 13824, (6, 12, 24), (2, 2, 1)),
    ("tpu7x-18432", "v7x", 9216, 2304, 4, 2, 18432, (8, 12, 24), (2, 2, 1)),
]


@pytest.mark.parametrize(
    ("name", "generation", "chips", "hosts", "per_host", "threads", "devices", "host_shape", "chip_shape"),
    TABLE,
    ids=[row[0] for row in TABLE],
)
def test_a_type_has_its_numbers_of_cores_chips_and_hosts(
    name: str,
    generation: str,
    chips: int,
    hosts: int,
    per_host: int,
    threads: int,
    devices: int,
    host_shape: tuple[int, int, int],
    chip_shape: tuple[int, int, int],
) -> None:
    found = AcceleratorType.parse(name, "here")
    assert found.name == name
    assert found.generation == generation
    assert found.count == int(name.split("-")[1])
    assert (found.chips, found.hosts, found.chips_per_host) == (chips, hosts, per_host)
    assert (found.threads_per_process, found.devices) == (threads, devices)
    assert found.bounds == Bounds(host_shape, chip_shape)


@pytest.mark.parametrize(
    ("generation", "cores"), [("v2", 2), ("v3", 2), ("v4", 2), ("v5e", 1), ("v5p", 2), ("v6e", 1), ("v7x", 2)]
)
def test_each_generation_has_its_cores_per_chip(generation: str, cores: int) -> None:
    assert AcceleratorType.parse(f"{generation}-8", "here").cores_per_chip == cores


# Shapes in chips, from the tables of "TPU v4" and "TPU v5p" and from xpk's list of v5p and tpu7x types.
@pytest.mark.parametrize(
    ("chips", "shape"),
    [
        (4, (2, 2, 1)),
        (8, (2, 2, 2)),
        (16, (2, 2, 4)),
        (32, (2, 4, 4)),
        (64, (4, 4, 4)),
        (128, (4, 4, 8)),
        (256, (4, 8, 8)),
        (320, (4, 4, 20)),
        (512, (8, 8, 8)),
        (576, (4, 12, 12)),
        (768, (8, 8, 12)),
        (1024, (8, 8, 16)),
        (1536, (8, 12, 16)),
        (1728, (12, 12, 12)),
        (2048, (8, 16, 16)),
        (3136, (4, 28, 28)),
        (3840, (12, 16, 20)),
        (4096, (16, 16, 16)),
        (5184, (12, 12, 36)),
        (6144, (16, 16, 24)),
        (8192, (16, 16, 32)),
        (8960, (16, 20, 28)),
    ],
)
def test_the_default_shape_is_nearest_to_a_cube(chips: int, shape: tuple[int, int, int]) -> None:
    assert most_cubic(chips) == shape


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_size_has_the_number_of_chips_in_its_name(generation: str) -> None:
    for size in sizes(generation):
        found = AcceleratorType.parse(f"{generation}-{size}", "here")
        assert found.chips * (found.cores_per_chip if GENERATIONS[generation].counts_cores else 1) == size


@pytest.mark.parametrize("text", ["v5e-16", "V5E-16", " v5litepod-16 ", "v5LitePod-16"])
def test_both_spellings_of_v5e_are_read(text: str) -> None:
    assert AcceleratorType.parse(text, "here").name == "v5litepod-16"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("v2-64", "v2-32 and v2-128"),
        ("v3-4096", "v3-2048"),
        ("v4-4", "v4-8"),
        ("v4-40", "v4-32 and v4-64"),
        ("v4-192", "v4-128 and v4-256"),
        ("v5e-2", "v5litepod-1 and v5litepod-4"),
        ("v5p-12416", "v5p-12288"),
        ("v6e-0", "v6e-1"),
        ("v5lite-8", "v5litepod-8"),
        ("v3_8", "v3-8"),
        ("tpu7x-4", "tpu7x-2 and tpu7x-8"),
        ("tpu9-8", "v2, v3, v4"),
        ("v4", "v4-8"),
        ("", "v3-8"),
        ("v4--8", "v4-8"),
        ("v4-8-1", "v4-8"),
        ("v4-" + "9" * 5000, "v4-8"),
    ],
)
def test_the_error_for_an_unknown_type_lists_the_nearest(text: str, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        AcceleratorType.parse(text, "TPU_ACCELERATOR_TYPE=x")
    assert advice in caught.value.fix
    assert caught.value.where == "TPU_ACCELERATOR_TYPE=x"


@pytest.mark.parametrize("text", ["tpu7x-16", "v7x-16", "TPU7x-16"])
def test_both_spellings_of_tpu7x_are_read(text: str) -> None:
    assert AcceleratorType.parse(text, "here").name == "tpu7x-16"


def test_bounds_count_hosts_and_chips() -> None:
    bounds = Bounds((2, 4, 1), (2, 2, 1))
    assert (bounds.host_count, bounds.chips_per_host_count, bounds.chip_count) == (8, 4, 32)
    assert bounds.chips == (4, 8, 1)
    assert bounds.on_one_host() == Bounds((1, 1, 1), (4, 8, 1))


@pytest.mark.parametrize(("text", "shape"), [("2,2,1", (2, 2, 1)), (" 16, 16 ,24 ", (16, 16, 24))])
def test_a_shape_is_three_positive_integers(text: str, shape: tuple[int, int, int]) -> None:
    assert parse_shape(text, "here") == shape


@pytest.mark.parametrize(
    "text", ["", "2,2", "2,2,1,2", "2x2x1", "2,2,0", "2,2,-1", "a,b,c", "2,2,1.0", "1,,1"]
)
def test_any_other_text_is_refused_as_a_shape(text: str) -> None:
    with pytest.raises(UsageError, match="three positive integers") as caught:
        parse_shape(text, "TPU_PROCESS_BOUNDS=x")
    assert caught.value.where == "TPU_PROCESS_BOUNDS=x"
