"""The Flower ClientApp: a node holds a shard, trains the sampled users in it, and replies once."""
