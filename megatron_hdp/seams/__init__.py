"""The only folder that touches Megatron."""
