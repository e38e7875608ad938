"""The Flower ClientApp: a node has a shard, trains the shard's sampled users, and replies once a round."""
