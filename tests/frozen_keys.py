"""Keys as they are in stores. `test_durable.py` says what to do where they change."""

STAGES = {
    "fragments": ["559d6ebd67e9fce62d84edd2968015d9"],
    "keys": {
        "answers": "f70dd95f5bab6de1c6f5e649ef9055c1fdfb4d1f",
        "clean": "2d72afe4b5a9cf3ebc971b73e0eed6da23ad6aa2",
        "files": "62e714c7a19b4c9768ad5dc3c036836df7ccac5d",
        "joined": "8dc71229cf65b89e92e5195759b5716e1296a762",
        "kinds": "8c4532f6c28b0ce1ccbb1801842b73049307aa23",
        "lists": "3ccb77dd92bd57cecde445b8c0a8aa7506c28dc0",
        "merged": "f06f8c4703910fa63313fcd1b334c8bbaf23890f",
        "pairs": "9eefdb6d192c1a64e0e1cbd9753837967294acbb",
        "scaled": "0ba5c426cf0d5739a90ac37a28c52b9ecf0d2af8",
        "table": "2c3d21d129fe16d6c7b12ee7136b45f3f34561db",
        "unnamed": "13ff73721107fdfe1ab4592653b5537e2a7eb966",
        "vectors": "35f2e03a33bd6a3a2383f56c7ebcd06855895d49",
        "words": "5af8c1b7617fddcf14c3a2c482b4c20092f195de",
    },
    "plans": {
        "answers": "613062e4529691767bdd2325e7997ed4",
        "clean": "65307d1e7184d2facabd6d0b6c4e0013",
        "files": "5692a50f56d260f97a154ad37312bb74",
        "joined": "977191b087f5fe0f287cf2d77d0cb6b9",
        "kinds": "74aa3071a6b75aff17eee19e7e0cced5",
        "lists": "c85a55df4cd447737cd8246ab245f8c1",
        "merged": "8ff5d70b7e41d03d0136fa7d688580f7",
        "pairs": "e3d8e3723de5c85ad9dbe98cf6297ced",
        "scaled": "56b6dca7bb5f5048aca93bdc7367d90c",
        "table": "aadfcb223a1c61ff8337a89328da9c23",
        "unnamed": "ee1d5bc6880ae11b86c88218514cd3f4",
        "vectors": "ae72a1020e41deccfbafaccc357371d0",
        "words": "b42ace6e06ba61c588a54711231e48f4",
    },
    "pools": {
        "answers": "8c22d02617f262b3",
        "kinds": "8c22d02617f262b3",
        "scaled": "4f1e593c74a5afc8",
        "vectors": "126e9436a760d51a",
        "words": "d294afbf619d11c5",
    },
}
CHECKS = {
    "drift": "b4d0d30407242b09",
    "error_rate": "0ee2439f0325b819",
    "golden": "34f97d4a1c1b2d7b",
    "ids_complete": "544e1fdb0b55c5db",
    "null_rate": "96df22b6e17cb3b2",
    "text": "664c966de5e895dd",
    "vectors": "3f26fd44308be3c2",
}
CODE = {
    "class": "c5f0b46e53c7b6447a8bc638ab20fa84698d3dcba83142941a75bfafeda655dd",
    "function": "6510aa34f48f5e305d47900fcf8478bd68ee902135eb4623716da245c4f85fd2",
    "value": "884bc9b5b14de4e7a425b8a0b0e377a053f13e6189fa6f62b0808765b8b02255",
    "version": "6e0a0d21234acfc6cb790d6d79995a5ece8d957e139e212140208801f321544a",
}
