"""The node "Attention by cutlass_attn". Copy this folder into ComfyUI's custom_nodes; cutlass_attn
has to be installed in ComfyUI's environment."""

from cutlass_attn.compat.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
