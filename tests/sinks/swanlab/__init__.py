"""The SwanLab sink against a server that only appends, under every fault."""
