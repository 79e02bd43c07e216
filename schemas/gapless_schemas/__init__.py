"""The record contract that the training side and the uploader share."""
