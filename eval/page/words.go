// SPDX-License-Identifier: Apache-2.0

package page

// Words are what somebody may not know who sees a page and has read nothing else.
var Words = []struct{ Word, Is string }{
	{"sPIN", "a programming model for network cards: handlers run on the packets of messages as these arrive. T. Hoefler et al., \u201csPIN: High-performance streaming Processing in the Network\u201d, SC 2017"},
	{"FPsPIN", "sPIN on an FPGA, which XsPIN rebuilds in software"},
	{"D4.7", "the report that describes FPsPIN: X. Huang, S. Pickartz et al., \u201cOptimized MPI and compute in network implementations\u201d, deliverable D4.7 of the RED-SEA project, 2023"},
	{"SC 2019", "S. Di Girolamo et al., \u201cNetwork-Accelerated Non-Contiguous Memory Transfers\u201d: how handlers place MPI datatypes"},
	{"NIC", "here, XsPIN attached to a network interface"},
	{"handler", "a function that the NIC runs for the header, for each packet, or for the end of a message"},
	{"HPU", "handler processing unit: a queue of packets, and one handler at a time. In hardware it is a core; here a thread serves one or several, which are called vHPUs (virtual HPUs) then"},
	{"context", "what an application installs on a NIC: rulesets, handlers and memory"},
	{"ruleset", "rules about bytes of a packet: the first ruleset that matches says to which context the packet goes"},
	{"message", "packets that belong together. Each carries one segment; the last has the mark EOM, end of message"},
	{"SLMP", "sPIN Lightweight Message Protocol: reliable messages over UDP"},
	{"window", "of a sender: how many segments may be on their way without an acknowledgement. Of an application: the memory where handlers put messages"},
	{"goodput", "bytes of the application that arrive per second, without headers and without what is sent again"},
	{"MPI datatype", "a description of where in memory the pieces of a message belong. Simple and Complex are the two that FPsPIN measures; others are of real applications"},
	{"committing", "preparing a datatype for use, once"},
	{"direct, specialized, HPU-local, RO-CP, RW-CP", "strategies to find out where the bytes of a packet belong: the first is XsPIN's own, which computes the place from the packet's offset, by divisions; the others are those of SC 2019. Specialized is code for one kind of datatype; HPU-local keeps a place in the datatype for each HPU and message, and goes past the packets of other HPUs. CP stands for checkpoints, saved places in the datatype from which a handler goes on: RO-CP copies them, RW-CP advances them"},
	{"Complex_apart", "Complex with room for all of its bytes: the elements of Complex overlap, so that with two HPUs it would be chance which bytes stay"},
	{"GEMM", "general matrix multiplication: what the receiving application computes meanwhile"},
	{"XDP, AF_XDP", "how Linux runs a program on a packet in the driver, and how such a program hands packets to a process without the network stack"},
	{"xs-nic, xs-host", "the two ends of the veth pair: XsPIN is attached to xs-nic, and xs-host is the other end, which sends in most experiments"},
	{"TSO, GSO", "offloads: TCP hands down up to 64 KiB at once, which are cut into frames later, or on a veth pair never"},
	{"MPICH, Open MPI, iperf3", "two implementations of MPI, and a program that measures TCP and UDP: what XsPIN is compared with"},
}

// reasons say of rows, by the beginning of their names, why their targets are missed, as far
// as that was looked into.
var reasons = map[string]string{
	"rx/noop_over_bare_64B":                 "The limit is the sending CPU (generator, XDP, copy into AF_XDP), not the HPU: matching, metadata and credit come on top there.",
	"kernel/noop_over_drop_64B":             "A drop is one instruction, next to a frame that is matched, counted, and handed by a tail call to a second program, which reads its key and counts what the handler did: some 37 ns on top, spread over all of that.",
	"kernel/slmp_noop3_over_drop":           "A segment is matched and handed over as packets are, which alone takes the 37 ns that the row of noop has. Then come four atomic operations, 4.5 ns each, in which CPUs agree on who has a segment, what is done and where the message ends, and some 25 ns for keys, bounds, counters, a clock and the handler's call.",
	"slmp/file_over_tcp":                    "On a veth pair TCP with TSO hands 64 KiB from one socket to the other, which nobody ever cuts into frames; SLMP is matched, copied and acknowledged frame by frame. TCP is, too, in the rows _same_frames, and slower there. How far the two are apart depends on the machine: 0.43 on an Intel Xeon, where TCP with TSO had 20 Gbit/s, and 0.29 to 0.31 on an AMD EPYC. Handlers in eBPF at tc get what nobody has cut: tc/file_over_tcp.",
	"slmp/file_stored_over_tcp":             "As for slmp/file_over_tcp: 0.44 on an Intel Xeon, 0.30 on an AMD EPYC, in full runs. This receiver also makes a file and renames it before the end is acknowledged.",
	"slmp/file_over_tcp_same_frames":        "Near a draw: two full runs on an Intel Xeon had 0.98 and 1.03, one on an AMD EPYC 1.34.",
	"hostq/polling_over_atomic":             "A queue writes a line of the cache in each direction, and its protocol for those that sleep needs two barriers. It is missed when the two CPUs are close to each other, where the bare word takes 64 ns.",
	"ddt/direct_over_best_least":            "RW-CP goes on from where the packet before it ended, so packets in order take no divisions; direct finds each packet's place anew. On an AMD EPYC it is missed for two types (SPECFEM3D_cm, WRF_x), only next to RW-CP made for one HPU, which gets all packets; on an Intel Xeon it is met.",
	"ddt/direct_over_loop_least":            "A loop that is written for one type puts the whole message in place at once. Direct takes it packet by packet, each with checks and one or two divisions, and the ends of a packet cut blocks in two. With the whole message at once it is closer: ddt/direct_whole_over_loop_least.",
	"hostq/notify_over_spsc":                "Each record carries its own turn word and is copied before use, so a process that scribbles over the ring harms only itself; the bare ring trusts its content, and publishes head and tail once a batch.",
	"match/drop4x4_over_drop":               "The target leaves matching a third of the time of a drop alone. It is missed where match/hit4x4_ns is more than a third of the time that match/drop_64B takes for a frame.",
	"slmp/file_stored_over_tcp_same_frames": "Near a draw: two full runs on an Intel Xeon had 0.95 and 1.01. This receiver also makes a file and renames it before the end is acknowledged, which TCP's does not.",
	"slmp/allocs_per_packet_small":          "Of short runs. The tables that remember which messages have ended double as they fill: some 70 allocations in a run, however long it is, and a quick run has few packets to divide them by. With runs of two seconds there is a tenth as much for each packet.",
	"rx/busy_ns_over_bare":                  "An absolute time: it depends on the machine's cache and clock. It was 57 ns two days before, when that machine ran twice as fast.",
	"slmp/state_bytes":                      "Beside each message is a pointer to the list that it goes back to (8 bytes, in a slice that grows by a quarter), so that no two threads get neighbours in memory. Without it there were 505 bytes.",
	"rtt/icmp_awake":                        "Linux answers ICMP within the client's system call, on the client's CPU. A handler is on another CPU, so two cache misses and a turn of a poll loop come on top, whatever the handler does.",
	"slmp/auto_over_best/":                  "With 40 ms there and back, a transfer of about a second is some twenty round trips. The window starts small and takes several of them to find its size, which the best fixed window has from the start.",
}
