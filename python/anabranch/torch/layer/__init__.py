"""Level 4: the layer as functions (`moe`, `routed_experts`) and as the module `MoE`."""
