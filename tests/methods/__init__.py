"""Tests of the methods: what must hold for every one of them."""
