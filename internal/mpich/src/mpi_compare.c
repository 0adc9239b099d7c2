// SPDX-License-Identifier: Apache-2.0

#include "mpi_type.h"

int main(void)
{
	return 0;
}
