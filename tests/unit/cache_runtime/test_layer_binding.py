"""Binding layers to groups: retention must cover visibility."""

from __future__ import annotations

import pytest

from cache_runtime.errors import CacheConfigError, UnboundLayerError
from cache_runtime.layer_binding import CacheLayer, PagedAttention, StateLayer, bind_cache_groups
from cache_runtime.recipes.plan import CacheMemoryPlan, pack
from cache_runtime.recipes.spec import CacheFamily, CacheFieldSpec, CacheGroupSpec, CacheRetention, layer_field_id


def plan() -> CacheMemoryPlan:
    """Layers 0 and 2 in a full group, layer 1 in a group that retains 32 tokens."""
    full = CacheGroupSpec(
        group_id="full",
        family=CacheFamily.HISTORY,
        retention=CacheRetention.FULL_HISTORY,
        rows_per_page=8,
        entry_stride_tokens=1,
    )
    sliding = CacheGroupSpec(
        group_id="sliding",
        family=CacheFamily.HISTORY,
        retention=CacheRetention.SLIDING_WINDOW,
        sliding_window_tokens=32,
        rows_per_page=8,
        entry_stride_tokens=1,
    )

    def fields(*layers: int) -> tuple[CacheFieldSpec, ...]:
        return tuple(
            CacheFieldSpec(field_id=layer_field_id(layer, name), dtype="uint8", block_shape=(8, 4))
            for layer in layers
            for name in ("k", "v")
        )

    declarations = [(full, fields(0, 2)), (sliding, fields(1))]
    return pack(declarations, prefix_granularity=8, packing={"full": 1, "sliding": 1}, max_padding_fraction=0.5).bind(4)


def test_binding_stamps_each_layer_with_its_planned_group() -> None:
    layers = [
        PagedAttention(layer=0),
        PagedAttention(layer=1, window_left_tokens=31),
        PagedAttention(layer=2, window_left_tokens=4),
    ]
    bind_cache_groups(layers, plan())
    assert [layer.group_id for layer in layers] == ["full", "sliding", "full"]


def test_an_unbound_layer_raises_when_asked_for_its_group() -> None:
    with pytest.raises(UnboundLayerError, match="layer 3"):
        _ = PagedAttention(layer=3).group_id


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (PagedAttention(layer=1), 'layer 1: full visibility cannot ride group "sliding".* 32'),
        (PagedAttention(layer=1, window_left_tokens=32), 'layer 1: sees 33 tokens.*"sliding" retains .* 32'),
        (PagedAttention(layer=0, field_name="latent"), 'no field "layers.0.latent"'),
        (StateLayer(layer=0, field_name="k"), 'layer 0: "k" rides a state group, but group "full" is a history group'),
        (PagedAttention(layer=7), 'layer 7: the memory plan holds no field "layers.7.k"'),
    ],
)
def test_a_layer_that_sees_more_than_its_group_retains_is_refused_and_nothing_is_bound(
    layer: CacheLayer, message: str
) -> None:
    first = PagedAttention(layer=0)
    with pytest.raises(CacheConfigError, match=message):
        bind_cache_groups([first, layer], plan())
    with pytest.raises(UnboundLayerError):
        _ = first.group_id


def test_binding_twice_is_the_same_binding_or_an_error() -> None:
    layer = PagedAttention(layer=0)
    layer.bind("full")
    layer.bind("full")
    with pytest.raises(UnboundLayerError, match='bound to group "full", cannot be bound to "sliding"'):
        layer.bind("sliding")


@pytest.mark.parametrize("arguments", [{"layer": -1}, {"layer": 0, "window_left_tokens": -1}])
def test_negative_declarations_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(CacheConfigError, match="must not be negative, got -1"):
        PagedAttention(**arguments)
