// SPDX-License-Identifier: Apache-2.0

/*
 * Packs and unpacks in memory. For each
 *
 *	FLUSH REPETITIONS COUNT LENGTH TYPE
 *
 * on its stdin, with LENGTH bytes of TYPE as mpi_type.h has it, it answers the ns of so many MPI_Unpack,
 * MPI_Pack and MPI_Type_commit, one per line in this order, and "ok". FLUSH bytes of
 * other memory are written before each unpack and pack.
 */
#include "mpi_memory.h"

/* A measurement takes at least as many ns: short calls are repeated, and divided. */
enum { SPAN = 50 * 1000 };

static struct elements elements;
static struct buffer buffer;
static char *stream;

static void unpack(void)
{
	int position = 0;

	MPI_Unpack(stream, elements.size, &position, buffer.origin, elements.count, elements.type, MPI_COMM_WORLD);
}

static void pack(void)
{
	int position = 0;

	MPI_Pack(buffer.origin, elements.count, elements.type, stream, elements.size, &position, MPI_COMM_WORLD);
}

static int64_t span(void (*call)(void), long times)
{
	int64_t start = now();

	for (long i = 0; i < times; i++)
		call();
	return now() - start;
}

static void measure(void (*call)(void), volatile char *cold, size_t flush, int64_t *ns, long repetitions)
{
	long times = 1;

	call();
	if (!flush)
		while (times < 1 << 20 && span(call, times) < SPAN)
			times *= 2;
	for (long i = 0; i < repetitions; i++) {
		for (size_t b = 0; b < flush; b += 64)
			cold[b]++;
		ns[i] = span(call, times) / times;
	}
}

/* A type is committed only once. */
static void measure_commit(const char *text, size_t length, int64_t *ns, long repetitions)
{
	for (long i = 0; i < repetitions; i++) {
		FILE *f = need(fmemopen((void *)text, length, "r"));
		MPI_Datatype type;
		const char *wrong = mpi_type_read(f, &type);

		if (wrong)
			fail("%s", wrong);
		ns[i] = now();
		MPI_Type_commit(&type);
		ns[i] = now() - ns[i];
		mpi_type_free(&type);
		fclose(f);
	}
}

int main(int argc, char **argv)
{
	long flush, repetitions, count, length, room = 0;
	char *cold = NULL; /* kept: to have its pages anew takes longer than all else */

	MPI_Init(&argc, &argv);
	answer(NULL, 0);
	while (scanf("%ld %ld %ld %ld", &flush, &repetitions, &count, &length) == 4) {
		char *text = need(malloc(length));
		int64_t *ns = need(calloc(3 * repetitions, sizeof(*ns)));
		FILE *f;

		if (flush > room) {
			free(cold);
			cold = need(calloc(flush, 1));
			room = flush;
		}
		getchar(); /* the line's end */
		if (fread(text, 1, length, stdin) != (size_t)length)
			fail("%ld bytes of a type are missing", length);
		f = need(fmemopen(text, length, "r"));
		elements_read(f, count, &elements);
		fclose(f);

		stream = stream_new(&elements);
		buffer = buffer_new(&elements);
		memset(buffer.memory, 0, buffer.length);
		measure(unpack, cold, flush, ns, repetitions);
		measure(pack, cold, flush, ns + repetitions, repetitions);
		measure_commit(text, length, ns + 2 * repetitions, repetitions);
		answer(ns, 3 * repetitions);

		mpi_type_free(&elements.type);
		buffer_free(&buffer);
		free(stream);
		free(ns);
		free(text);
	}
	free(cold);
	MPI_Finalize();
	return 0;
}
