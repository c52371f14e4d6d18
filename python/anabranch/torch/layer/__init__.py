"""Level 4: the whole layer as functions (`moe`, `routed_experts`) and as the module `MoE`."""
