"""`megatron-hdp simulate`: is HDP worth it for some data, by how much at most, and with which settings."""
