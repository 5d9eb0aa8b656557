"""The algorithm and the written contracts between the processes; imports no server, no Ray and no SGLang."""
