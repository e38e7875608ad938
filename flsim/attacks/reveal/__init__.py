"""The information about users in a round's updates: their words, and whether a record was used."""
