"""Short HLO modules in the manner of the compilers for TPU, for the tests of their reading."""

from __future__ import annotations

SUM = """\
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y), metadata={op_name="all-reduce(this is text)"}
}
"""


def module(entry: str, before: str = "", devices: int = 8) -> str:
    """A module whose entry computation holds the lines of `entry`, after `before`."""
    lines = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    return (
        f"HloModule jit_f, is_scheduled=true, num_partitions={devices}\n\n{SUM}\n{before}\n"
        f"ENTRY %main.1_spmd (param: f32[8,128]) -> f32[8,128] {{\n"
        f"  %param = f32[8,128]{{1,0:T(8,128)}} parameter(0)\n{lines}\n}}\n"
    )


def all_reduce(groups: str) -> str:
    """A module with one all-reduce over `groups`, as HLO writes them."""
    return module(
        "ROOT %all-reduce.1 = f32[8,128]{1,0:T(8,128)S(1)} all-reduce(%param), channel_id=1, "
        f"replica_groups={groups}, use_global_device_ids=true, to_apply=%add, "
        'metadata={op_name="jit(f)/psum"}'
    )


ASYNC = module(
    """
%ag-start = ((bf16[2,64]{1,0}, f32[4]{0}), (bf16[8,64]{1,0}, f32[16]{0})) all-gather-start(%a, \
%b), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true
%cp-start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, \
u32[]{:S(2)}) collective-permute-start(%param), source_target_pairs={{0,1},{1,0}}
%ag-done = (bf16[8,64]{1,0}, f32[16]{0}) all-gather-done(%ag-start)
%cp-done = f32[8,128]{1,0:T(8,128)S(1)} collective-permute-done(%cp-start)
%ar-start = f32[8,128]{1,0} all-reduce-start(%cp-done), replica_groups={}, to_apply=%add
%ar-done = f32[8,128]{1,0} all-reduce-done(%ar-start)
%rs-start = ((f32[8,128]{1,0}), f32[1,128]{1,0}, u32[]{:S(2)}) async-start(%ar-done), calls=%wrapped
%rs-update = ((f32[8,128]{1,0}), f32[1,128]{1,0}, u32[]{:S(2)}) async-update(%rs-start), \
calls=%wrapped
ROOT %rs-done = f32[1,128]{1,0} async-done(%rs-update), calls=%wrapped
""",
    before="""\
%wrapped (p: f32[8,128]) -> f32[1,128] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %rs = f32[1,128]{1,0} reduce-scatter(%p), channel_id=2, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}
""",
)
"""All forms of asynchronous collectives: 4 of them."""

FUSED = module(
    """
%start = (f32[8,128]{1,0}, f32[64,128]{1,0}, u32[]{:S(2)}) fusion(%param), kind=kCustom, \
calls=%fused_start
%middle = (f32[4]{0}, f32[64,128]{1,0}) fusion(%start, %other), kind=kOutput, \
calls=%async_collective_fusion.1
%done = f32[64,128]{1,0} fusion(%middle), kind=kCustom, calls=%fused_done
ROOT %scattered = f32[8,128]{1,0} fusion(%done), kind=kCustom, calls=%all-reduce-scatter.1
""",
    before="".join(
        f"""\
%{name} (p: f32[8,128]) -> f32[64,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  %ag = f32[64,128]{{1,0}} all-gather(%p), channel_id=38, replica_groups=[1,8]<=[8], \
dimensions={{0}}, use_global_device_ids=true, backend_config={{"async_collective_fusion_config":\
{{"flag_start":"{flag}"}}}}
  ROOT %last = f32[64,128]{{1,0}} {last}
}}
"""
        for name, flag, last in (
            ("fused_start", -1, 'custom-call(%ag), custom_call_target="AsyncCollectiveStart"'),
            ("async_collective_fusion.1", 2, "tuple(%ag)"),
            ("fused_done", 2, 'custom-call(%ag), custom_call_target="AsyncCollectiveDone"'),
        )
    )
    + """\
%all-reduce-scatter.1 (p: f32[64,128]) -> f32[8,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %ar = f32[64,128]{1,0} all-reduce(%p), channel_id=10, replica_groups={{0,1,2,3,4,5,6,7}}, \
use_global_device_ids=true, to_apply=%add
  ROOT %slice = f32[8,128]{1,0} dynamic-slice(%ar, %c, %c), dynamic_slice_sizes={8,128}
}
""",
)
"""An all-gather spread over the computations beside it, and an all-reduce whose result is cut."""


def loop(limit: str = "constant(6)", direction: str = "LT") -> str:
    """A loop that the compiler for TPU wrote without its trip count, around one all-reduce."""
    return module(
        """
%zero = s32[]{:T(128)} constant(0)
%start = s32[]{:T(128)} copy(%zero)
%t = (s32[]{:T(128)}, f32[8,128]{1,0}, /*index=2*/s32[]{:T(128)}) tuple(%start, %param, %zero)
%while.1 = (s32[]{:T(128)}, f32[8,128]{1,0}, /*index=2*/s32[]{:T(128)}) while(%t), \
condition=%cond, body=%body
ROOT %r = f32[8,128]{1,0} get-tuple-element(%while.1), index=1
""",
        before=f"""\
%cond (p: (s32[], f32[8,128], s32[])) -> pred[] {{
  %limit = s32[]{{:T(128)}} {limit}
  %p = (s32[], f32[8,128], s32[]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %limit), direction={direction}
}}

%body (q: (s32[], f32[8,128], s32[])) -> (s32[], f32[8,128], s32[]) {{
  %q = (s32[], f32[8,128], s32[]) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %two = s32[]{{:T(128)}} constant(2)
  %next = s32[]{{:T(128)}} add(%two, %j)
  %x = f32[8,128]{{1,0}} get-tuple-element(%q), index=1
  %ar = f32[8,128]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={{{{0,1}}}}, \
use_global_device_ids=true, to_apply=%add
  %z = s32[]{{:T(128)}} get-tuple-element(%q), index=2
  ROOT %out = (s32[], f32[8,128]{{1,0}}, s32[]) tuple(%next, %ar, %z)
}}
""",
    )
