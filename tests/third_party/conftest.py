"""The folders here are packages with tests of their own: test_third_party.py installs them and runs those."""

collect_ignore_glob = ["acme_*"]
