// What cannot be inspected: test_inspect.py.
__global__ void lane_number(int* out)
{
    int lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    out[threadIdx.x] = lane;
}

int main()
{
    lane_number<<<1, 32>>>(nullptr);
}
