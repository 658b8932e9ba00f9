"""Keys as they are in stores. `test_key_versions.py` says what to do where they change."""

STAGES = {
    "fragments": ["559d6ebd67e9fce62d84edd2968015d9"],
    "keys": {
        "answers": "4bc5b1f67e56f03d0f572d950563c1cb171d9771",
        "clean": "1f9206d1302f244a147a11b6300763416d2e6681",
        "files": "c94631b39b115e88f653cf901a40496569ce3b1d",
        "joined": "dde8bc6295d56c9ef252079ad191d04ff534f8bf",
        "kinds": "d09b061109f496a50c501d3deeef93fe5656b26c",
        "lists": "8b961813b8ee08451848d46cee1011906878307d",
        "merged": "96b9fe6452a3ce94a589e3c9a34a2f2fb91cc833",
        "pairs": "28c6536bdf9627fa4cf8d997e4213040d68d24c2",
        "scaled": "949ab7c693c3aa9635a9c020f26a4f00144caf20",
        "table": "c4c939c5ae5c010f4000f5fcb60fb4067aca1eb0",
        "unnamed": "7484a80b711756484cad1844a33ee3f92f4b3f40",
        "vectors": "105d43f7ad2e83f73e73c7606ace0c88787af17c",
        "words": "8d870df03ad4d2ca2ffcb9622123edab135cfda7",
    },
    "plans": {
        "answers": "fe6ca434e3882612740480c118361ece",
        "clean": "99f283392461c1ee863de58c9604316d",
        "files": "cc270df0da69792fc70c4dd2c0b4366f",
        "joined": "88d218f119adb26ce5e34823a34b3b10",
        "kinds": "9396ed70792ae580389fff65c5dacf28",
        "lists": "c77b5fff0e078203d539145d093730a3",
        "merged": "1df8f8b2c1c4ccc08eca0b6ddef05f1a",
        "pairs": "1268c87cbe9ef7387ca97b92fb9fa219",
        "scaled": "187e9eb93f81a015232da0d4fb989caa",
        "table": "d21bfff15ca322cd20eb92acbdee76d4",
        "unnamed": "d10eb5c5bb91b053237c234f3087367e",
        "vectors": "9754998ea105c5e125ccae10557fa9a0",
        "words": "fd778d9bd12d9e0a01c07d9f0333c94b",
    },
    "pools": {
        "answers": "80715a35eeea6e37",
        "kinds": "80715a35eeea6e37",
        "scaled": "11ee1b18626a7ef1",
        "vectors": "1d7bce167bd87914",
        "words": "422ca301333c5472",
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
    "class": "7c3d174285e944f8dfd4e386d3a25990d088f2b90eb16e6285497de80229f06d",
    "function": "5cd9ab2eaa198b6fcf453fdafd59a21b9fc59dc94aefda132074b27746133e1f",
    "value": "d1547621701986831616de2a00d67ab64553ce50f69ad05a118fe6f634578dba",
    "version": "6e0a0d21234acfc6cb790d6d79995a5ece8d957e139e212140208801f321544a",
}
