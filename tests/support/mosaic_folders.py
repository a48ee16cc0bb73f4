"""MDS folders that `MDSWriter` of mosaicml-streaming 0.13.0 wrote, each file as base64."""

DOCUMENTS = [
    "Two lines,\nas a document.",
    "",
    "naïve 北京 🙂 don't",
    "The last one The last one The last one The last one ",
]

FOLDERS = {
    "plain": {
        "index.json": (
            "eyJzaGFyZHMiOiBbeyJjb2x1bW5fZW5jb2RpbmdzIjogWyJieXRlcyIsICJqc29uIiwgImludCIsICJzdHIiXSwgIm"
            "NvbHVtbl9uYW1lcyI6IFsia2V5IiwgIm1ldGEiLCAibiIsICJ0ZXh0Il0sICJjb2x1bW5fc2l6ZXMiOiBbbnVsbCwg"
            "bnVsbCwgOCwgbnVsbF0sICJjb21wcmVzc2lvbiI6IG51bGwsICJmb3JtYXQiOiAibWRzIiwgImhhc2hlcyI6IFtdLC"
            "AicmF3X2RhdGEiOiB7ImJhc2VuYW1lIjogInNoYXJkLjAwMDAwLm1kcyIsICJieXRlcyI6IDMyMSwgImhhc2hlcyI6"
            "IHt9fSwgInNhbXBsZXMiOiAyLCAic2l6ZV9saW1pdCI6IDMzMCwgInZlcnNpb24iOiAyLCAiemlwX2RhdGEiOiBudW"
            "xsfSwgeyJjb2x1bW5fZW5jb2RpbmdzIjogWyJieXRlcyIsICJqc29uIiwgImludCIsICJzdHIiXSwgImNvbHVtbl9u"
            "YW1lcyI6IFsia2V5IiwgIm1ldGEiLCAibiIsICJ0ZXh0Il0sICJjb2x1bW5fc2l6ZXMiOiBbbnVsbCwgbnVsbCwgOC"
            "wgbnVsbF0sICJjb21wcmVzc2lvbiI6IG51bGwsICJmb3JtYXQiOiAibWRzIiwgImhhc2hlcyI6IFtdLCAicmF3X2Rh"
            "dGEiOiB7ImJhc2VuYW1lIjogInNoYXJkLjAwMDAxLm1kcyIsICJieXRlcyI6IDI4OSwgImhhc2hlcyI6IHt9fSwgIn"
            "NhbXBsZXMiOiAxLCAic2l6ZV9saW1pdCI6IDMzMCwgInZlcnNpb24iOiAyLCAiemlwX2RhdGEiOiBudWxsfSwgeyJj"
            "b2x1bW5fZW5jb2RpbmdzIjogWyJieXRlcyIsICJqc29uIiwgImludCIsICJzdHIiXSwgImNvbHVtbl9uYW1lcyI6IF"
            "sia2V5IiwgIm1ldGEiLCAibiIsICJ0ZXh0Il0sICJjb2x1bW5fc2l6ZXMiOiBbbnVsbCwgbnVsbCwgOCwgbnVsbF0s"
            "ICJjb21wcmVzc2lvbiI6IG51bGwsICJmb3JtYXQiOiAibWRzIiwgImhhc2hlcyI6IFtdLCAicmF3X2RhdGEiOiB7Im"
            "Jhc2VuYW1lIjogInNoYXJkLjAwMDAyLm1kcyIsICJieXRlcyI6IDMxOCwgImhhc2hlcyI6IHt9fSwgInNhbXBsZXMi"
            "OiAxLCAic2l6ZV9saW1pdCI6IDMzMCwgInZlcnNpb24iOiAyLCAiemlwX2RhdGEiOiBudWxsfV0sICJ2ZXJzaW9uIj"
            "ogMn0="
        ),
        "shard.00000.mds": (
            "AgAAAO8AAAAkAQAAQQEAAHsiY29sdW1uX2VuY29kaW5ncyI6IFsiYnl0ZXMiLCAianNvbiIsICJpbnQiLCAic3RyIl"
            "0sICJjb2x1bW5fbmFtZXMiOiBbImtleSIsICJtZXRhIiwgIm4iLCAidGV4dCJdLCAiY29sdW1uX3NpemVzIjogW251"
            "bGwsIG51bGwsIDgsIG51bGxdLCAiY29tcHJlc3Npb24iOiBudWxsLCAiZm9ybWF0IjogIm1kcyIsICJoYXNoZXMiOi"
            "BbXSwgInNpemVfbGltaXQiOiAzMzAsICJ2ZXJzaW9uIjogMn0AAAAACAAAABkAAAB7InUiOiAwfQAAAAAAAAAAVHdv"
            "IGxpbmVzLAphcyBhIGRvY3VtZW50LgEAAAAIAAAAAAAAAAB7InUiOiAxfQEAAAAAAAAA"
        ),
        "shard.00001.mds": (
            "AQAAAOsAAAAhAQAAeyJjb2x1bW5fZW5jb2RpbmdzIjogWyJieXRlcyIsICJqc29uIiwgImludCIsICJzdHIiXSwgIm"
            "NvbHVtbl9uYW1lcyI6IFsia2V5IiwgIm1ldGEiLCAibiIsICJ0ZXh0Il0sICJjb2x1bW5fc2l6ZXMiOiBbbnVsbCwg"
            "bnVsbCwgOCwgbnVsbF0sICJjb21wcmVzc2lvbiI6IG51bGwsICJmb3JtYXQiOiAibWRzIiwgImhhc2hlcyI6IFtdLC"
            "Aic2l6ZV9saW1pdCI6IDMzMCwgInZlcnNpb24iOiAyfQIAAAAIAAAAGAAAAAABeyJ1IjogMn0CAAAAAAAAAG5hw692"
            "ZSDljJfkuqwg8J+ZgiBkb24ndA=="
        ),
        "shard.00002.mds": (
            "AQAAAOsAAAA+AQAAeyJjb2x1bW5fZW5jb2RpbmdzIjogWyJieXRlcyIsICJqc29uIiwgImludCIsICJzdHIiXSwgIm"
            "NvbHVtbl9uYW1lcyI6IFsia2V5IiwgIm1ldGEiLCAibiIsICJ0ZXh0Il0sICJjb2x1bW5fc2l6ZXMiOiBbbnVsbCwg"
            "bnVsbCwgOCwgbnVsbF0sICJjb21wcmVzc2lvbiI6IG51bGwsICJmb3JtYXQiOiAibWRzIiwgImhhc2hlcyI6IFtdLC"
            "Aic2l6ZV9saW1pdCI6IDMzMCwgInZlcnNpb24iOiAyfQMAAAAIAAAANAAAAAABAnsidSI6IDN9AwAAAAAAAABUaGUg"
            "bGFzdCBvbmUgVGhlIGxhc3Qgb25lIFRoZSBsYXN0IG9uZSBUaGUgbGFzdCBvbmUg"
        ),
    },
    "zstd": {
        "index.json": (
            "eyJzaGFyZHMiOiBbeyJjb2x1bW5fZW5jb2RpbmdzIjogWyJieXRlcyIsICJqc29uIiwgImludCIsICJzdHIiXSwgIm"
            "NvbHVtbl9uYW1lcyI6IFsia2V5IiwgIm1ldGEiLCAibiIsICJ0ZXh0Il0sICJjb2x1bW5fc2l6ZXMiOiBbbnVsbCwg"
            "bnVsbCwgOCwgbnVsbF0sICJjb21wcmVzc2lvbiI6ICJ6c3RkOjMiLCAiZm9ybWF0IjogIm1kcyIsICJoYXNoZXMiOi"
            "BbXSwgInJhd19kYXRhIjogeyJiYXNlbmFtZSI6ICJzaGFyZC4wMDAwMC5tZHMiLCAiYnl0ZXMiOiAzMjUsICJoYXNo"
            "ZXMiOiB7fX0sICJzYW1wbGVzIjogMiwgInNpemVfbGltaXQiOiAzMzAsICJ2ZXJzaW9uIjogMiwgInppcF9kYXRhIj"
            "ogeyJiYXNlbmFtZSI6ICJzaGFyZC4wMDAwMC5tZHMuenN0ZCIsICJieXRlcyI6IDIzNCwgImhhc2hlcyI6IHt9fX0s"
            "IHsiY29sdW1uX2VuY29kaW5ncyI6IFsiYnl0ZXMiLCAianNvbiIsICJpbnQiLCAic3RyIl0sICJjb2x1bW5fbmFtZX"
            "MiOiBbImtleSIsICJtZXRhIiwgIm4iLCAidGV4dCJdLCAiY29sdW1uX3NpemVzIjogW251bGwsIG51bGwsIDgsIG51"
            "bGxdLCAiY29tcHJlc3Npb24iOiAienN0ZDozIiwgImZvcm1hdCI6ICJtZHMiLCAiaGFzaGVzIjogW10sICJyYXdfZG"
            "F0YSI6IHsiYmFzZW5hbWUiOiAic2hhcmQuMDAwMDEubWRzIiwgImJ5dGVzIjogMjkzLCAiaGFzaGVzIjoge319LCAi"
            "c2FtcGxlcyI6IDEsICJzaXplX2xpbWl0IjogMzMwLCAidmVyc2lvbiI6IDIsICJ6aXBfZGF0YSI6IHsiYmFzZW5hbW"
            "UiOiAic2hhcmQuMDAwMDEubWRzLnpzdGQiLCAiYnl0ZXMiOiAyMjUsICJoYXNoZXMiOiB7fX19LCB7ImNvbHVtbl9l"
            "bmNvZGluZ3MiOiBbImJ5dGVzIiwgImpzb24iLCAiaW50IiwgInN0ciJdLCAiY29sdW1uX25hbWVzIjogWyJrZXkiLC"
            "AibWV0YSIsICJuIiwgInRleHQiXSwgImNvbHVtbl9zaXplcyI6IFtudWxsLCBudWxsLCA4LCBudWxsXSwgImNvbXBy"
            "ZXNzaW9uIjogInpzdGQ6MyIsICJmb3JtYXQiOiAibWRzIiwgImhhc2hlcyI6IFtdLCAicmF3X2RhdGEiOiB7ImJhc2"
            "VuYW1lIjogInNoYXJkLjAwMDAyLm1kcyIsICJieXRlcyI6IDMyMiwgImhhc2hlcyI6IHt9fSwgInNhbXBsZXMiOiAx"
            "LCAic2l6ZV9saW1pdCI6IDMzMCwgInZlcnNpb24iOiAyLCAiemlwX2RhdGEiOiB7ImJhc2VuYW1lIjogInNoYXJkLj"
            "AwMDAyLm1kcy56c3RkIiwgImJ5dGVzIjogMjEyLCAiaGFzaGVzIjoge319fV0sICJ2ZXJzaW9uIjogMn0="
        ),
        "shard.00000.mds.zstd": (
            "KLUv/WBFAAUHANILKCmQKen//////z83ftY+IhKD3XIXISn6ksTuq+IrouD8aDOvtMTEWNBOAf//Hz0MUEFvMmdpzK"
            "ljJZA4V9c1CgXkFHQ+8D/g/x8HTU7gJSRJlOli5KPcYNVgWCvWNIdEYZofPAW3KXM2Egzh0lrOPspdka06mSMjkqm9"
            "xIBNc69uYwi8hJztaMCFU5AfVpm2bDKWOastaPGjhB8R/L/4DxAZAFkNgAvEKgdn9qa1/FdSgh+j9rYu4ASSjGl8s2"
            "WEKzCMjWWwlAHB4KLivKrDypKh1qAKE6zIqMSgBQUK"
        ),
        "shard.00001.mds.zstd": (
            "KLUv/WAlAL0GAPIKKCyAS9IBnpLExGINVozZPIZqI/KNSBN/y+3/9Ue5dlcQNJc44zAHlQimc7CRFD2wTmEERUUHWm"
            "BoTEhsoE4uMtI6WVn+P+A/wP8HRMHTSSIiYJjVFoPos1jCSaJap/acAtOo5iexyXWLWZ9DM0DEmLPP4n7QTq2Nog3a"
            "0iJCyNfcu9YxQyJK1qYk5AE2yQu7lIusQrY5zEWy8i8C/zn+LwEVALgA5pSg4JRGmWy1y4nJGXP4xsoIbWB4GMtgKQ"
            "OCwUXFeVWHlSVDrUEVJliRUYkBCwoU"
        ),
        "shard.00002.mds.zstd": (
            "KLUv/WBCAFUGAJJKJCeQKen//////w+bGw0iIm1AW+4itERWktg0VQx6Wx1/bSapinm2kRSo67BZMVTlAGHKJRcK4/"
            "8J/gf8B5AYeAqReAQQWm2xQ5vFCislaa3acwsoJc1NYsp1i1nfQyvAw9iyzeKO0FatjVEHbWrxJORr7l3ruCHxJGsz"
            "ComAKZlhV+KQ1WPbwhySi98w+D/x3wgWAGDW41ZARwwFpzTKZKtdTkzOmMM3VkZoA8PDWAZLGRAMLirOqzqsLBlqDa"
            "owwYqMSgxYUKA="
        ),
    },
    "gz": {
        "index.json": (
            "eyJzaGFyZHMiOiBbeyJjb2x1bW5fZW5jb2RpbmdzIjogWyJieXRlcyIsICJqc29uIiwgImludCIsICJzdHIiXSwgIm"
            "NvbHVtbl9uYW1lcyI6IFsia2V5IiwgIm1ldGEiLCAibiIsICJ0ZXh0Il0sICJjb2x1bW5fc2l6ZXMiOiBbbnVsbCwg"
            "bnVsbCwgOCwgbnVsbF0sICJjb21wcmVzc2lvbiI6ICJneiIsICJmb3JtYXQiOiAibWRzIiwgImhhc2hlcyI6IFtdLC"
            "AicmF3X2RhdGEiOiB7ImJhc2VuYW1lIjogInNoYXJkLjAwMDAwLm1kcyIsICJieXRlcyI6IDMyMSwgImhhc2hlcyI6"
            "IHt9fSwgInNhbXBsZXMiOiAyLCAic2l6ZV9saW1pdCI6IDMzMCwgInZlcnNpb24iOiAyLCAiemlwX2RhdGEiOiB7Im"
            "Jhc2VuYW1lIjogInNoYXJkLjAwMDAwLm1kcy5neiIsICJieXRlcyI6IDIxOSwgImhhc2hlcyI6IHt9fX0sIHsiY29s"
            "dW1uX2VuY29kaW5ncyI6IFsiYnl0ZXMiLCAianNvbiIsICJpbnQiLCAic3RyIl0sICJjb2x1bW5fbmFtZXMiOiBbIm"
            "tleSIsICJtZXRhIiwgIm4iLCAidGV4dCJdLCAiY29sdW1uX3NpemVzIjogW251bGwsIG51bGwsIDgsIG51bGxdLCAi"
            "Y29tcHJlc3Npb24iOiAiZ3oiLCAiZm9ybWF0IjogIm1kcyIsICJoYXNoZXMiOiBbXSwgInJhd19kYXRhIjogeyJiYX"
            "NlbmFtZSI6ICJzaGFyZC4wMDAwMS5tZHMiLCAiYnl0ZXMiOiAyODksICJoYXNoZXMiOiB7fX0sICJzYW1wbGVzIjog"
            "MSwgInNpemVfbGltaXQiOiAzMzAsICJ2ZXJzaW9uIjogMiwgInppcF9kYXRhIjogeyJiYXNlbmFtZSI6ICJzaGFyZC"
            "4wMDAwMS5tZHMuZ3oiLCAiYnl0ZXMiOiAyMjEsICJoYXNoZXMiOiB7fX19LCB7ImNvbHVtbl9lbmNvZGluZ3MiOiBb"
            "ImJ5dGVzIiwgImpzb24iLCAiaW50IiwgInN0ciJdLCAiY29sdW1uX25hbWVzIjogWyJrZXkiLCAibWV0YSIsICJuIi"
            "wgInRleHQiXSwgImNvbHVtbl9zaXplcyI6IFtudWxsLCBudWxsLCA4LCBudWxsXSwgImNvbXByZXNzaW9uIjogImd6"
            "IiwgImZvcm1hdCI6ICJtZHMiLCAiaGFzaGVzIjogW10sICJyYXdfZGF0YSI6IHsiYmFzZW5hbWUiOiAic2hhcmQuMD"
            "AwMDIubWRzIiwgImJ5dGVzIjogMzE4LCAiaGFzaGVzIjoge319LCAic2FtcGxlcyI6IDEsICJzaXplX2xpbWl0Ijog"
            "MzMwLCAidmVyc2lvbiI6IDIsICJ6aXBfZGF0YSI6IHsiYmFzZW5hbWUiOiAic2hhcmQuMDAwMDIubWRzLmd6IiwgIm"
            "J5dGVzIjogMjAzLCAiaGFzaGVzIjoge319fV0sICJ2ZXJzaW9uIjogMn0="
        ),
        "shard.00000.mds.gz": (
            "H4sIANYBB2sC/01POw7CMAxNmRA3YIsixgoVWBAbd2BDCIXWQCBxUJ3yVc/MFYibDlhyXmy/9xIPhBDfmJNMiHXMjy"
            "q9bRzuAUtfGTyRWsmtOrwCkMqlupBHRoOBgUKtdhF7EWoHSXCFF88dBM3YaQI8wz+bzDuxsbE2l+lcpkuiuVsNRCY+"
            "uZLq9GaTo6+dDly7qvvRWdM52bCGPffWOMOUxaKIrTvUvcW8jZuKYcyx4FWb2Cu6Hsfm4aU1CJSPNEktK182DjBMs1"
            "7URVLN2qyvf+JW7+dBAQAA"
        ),
        "shard.00001.mds.gz": (
            "H4sIANYBB2sC/01POw4CIRBlrTyCJdLYWBhtjFcxxuDuuKLLYBbW+ImNtb2x8gIm9rZeRSsbjyCzbIwkjwfDe2+GiD"
            "H29mhGjO1EbLJC4xgwNonC1IoBH4rJxoEVbS7m1iCxQkdkXS5GnisTSg3BsIANvWtwkrj0OFi7f7VV26DGIsvaPOz9"
            "cAgyvczBWuVbDrhItxQyNbmWju46KSeaSTsLMeShzHGmtCJJr9fxpRXkVUR3X/PfrHs0PFi0E8WvSgvl47YC/jqenv"
            "cr/1zOB54YbLkvb0xNFiEBAAA="
        ),
        "shard.00002.mds.gz": (
            "H4sIANYBB2sC/41Pyw7CIBCkevEzCOcejPVgPPgV3oxpsF1blIdhqbFt/GJ/Qrb04FGSYdjdmQEyxtgn4pAxNorK6c"
            "7YEmzlamUbFHt+Epc+AIqcixs6S6xsIMLgxTnybLLSQDLcoae5gSCJJ0+AV/hVoxqS2nZa5zztu3RIMvPwgKjilXsu"
            "moFCrs4bGag29fSiVmKbYshDmaVWRpGkKNax9QQ/R2zey/jNVcQ2gmWLUXQkm9q0ji1wLTFwZ4H/WXwBwi0cGz4BAA"
            "A="
        ),
    },
}
