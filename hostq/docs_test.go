// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"
)

// docs/control.md tells clients in other languages where everything is. Its tables have
// these rows, and no others.
func TestTheReferenceHasThisLayout(t *testing.T) {
	text, err := os.ReadFile("../docs/control.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n### Queues\n")
	section, _, ok2 := strings.Cut(section, "\n### An example\n")
	if !ok || !ok2 {
		t.Fatal("docs/control.md has no section Queues, before An example")
	}
	var (
		s     shared
		event eventSlot
		ask   requestSlot
		reply responseSlot
	)
	const lane, counter = unsafe.Sizeof(sharedLane{}), unsafe.Sizeof(sharedCounter{})
	slots := uintptr(align(int(unsafe.Sizeof(s))))
	type row struct {
		offset, size any
		what         string // as it begins
	}
	for _, table := range []struct {
		name string
		rows []row
	}{
		{"the pair", []row{
			{unsafe.Offsetof(s.magic), unsafe.Sizeof(s.magic), fmt.Sprintf("magic, %#x:", uint64(magic))},
			{unsafe.Offsetof(s.layout), unsafe.Sizeof(s.layout), "events, requests, payload, lanes"},
			{unsafe.Offsetof(s.waiting), unsafe.Sizeof(s.waiting), "waiting: 1 "},
			{unsafe.Offsetof(s.ended), unsafe.Sizeof(s.ended), fmt.Sprintf("ended: %d if the NIC has left, %d if it found", endDetached, endBroken)},
			{unsafe.Offsetof(s.events), unsafe.Sizeof(s.events), "head of the events"},
			{unsafe.Offsetof(s.requests), unsafe.Sizeof(s.requests), "head of the requests"},
			{fmt.Sprintf("%d + %d l", unsafe.Offsetof(s.lanes)+unsafe.Offsetof(s.lanes[0].waiting), lane), unsafe.Sizeof(s.lanes[0].waiting), "lane l waiting"},
			{fmt.Sprintf("%d + %d l", unsafe.Offsetof(s.lanes)+unsafe.Offsetof(s.lanes[0].head), lane), unsafe.Sizeof(s.lanes[0].head), "head of the responses of lane l"},
			{fmt.Sprintf("%d + %d i", unsafe.Offsetof(s.counters)+unsafe.Offsetof(s.counters[0].value), counter), unsafe.Sizeof(s.counters[0].value), fmt.Sprintf("counting event i, of %d", Counters)},
			{fmt.Sprintf("%d + %d i", unsafe.Offsetof(s.counters)+unsafe.Offsetof(s.counters[0].want), counter), unsafe.Sizeof(s.counters[0].want), "ring at this value"},
			{slots, fmt.Sprintf("events × %d", unsafe.Sizeof(event)), "event slots"},
			{"after them", fmt.Sprintf("requests × (%d + payload, rounded up to %d)", unsafe.Sizeof(ask), align(1)), "request slots"},
			{"after them", fmt.Sprintf("lanes × requests × (%d + payload, rounded up to %d)", unsafe.Sizeof(reply), align(1)), "response slots, lane by lane"},
		}},
		{"an event", []row{
			{unsafe.Offsetof(event.lap), unsafe.Sizeof(event.lap), "lap"},
			{unsafe.Offsetof(event.kind), unsafe.Sizeof(event.kind), fmt.Sprintf("kind, low 4 bits: %d message ended, %d message failed, %d context fault, %d events lost. Flags: %d flow control, %d IPv4 source, %d IPv6 source, %d text",
				MessageEnded, MessageFailed, ContextFault, Overflow, eventFlow, eventIPv4, eventIPv6, eventTexts)},
			{unsafe.Offsetof(event.cause), unsafe.Sizeof(event.cause), fmt.Sprintf("cause, low 7 bits: 0 complete, 1 timed out, 2 removed, 3 failed. Flag: %d missing", eventMissing)},
			{unsafe.Offsetof(event.port), unsafe.Sizeof(event.port), "source port"},
			{unsafe.Offsetof(event.number), unsafe.Sizeof(event.number), "number of the message"},
			{unsafe.Offsetof(event.slot), unsafe.Sizeof(event.slot), "its slot in the NIC"},
			{unsafe.Offsetof(event.length), unsafe.Sizeof(event.length), "length of the message in bytes, or how many events were lost"},
			{unsafe.Offsetof(event.user), unsafe.Sizeof(event.user), "user word"},
			{unsafe.Offsetof(event.dropped), unsafe.Sizeof(event.dropped), "bytes of the message that were dropped"},
			{unsafe.Offsetof(event.time), unsafe.Sizeof(event.time), "when it ended: CLOCK_MONOTONIC in ns"},
			{unsafe.Offsetof(event.address), unsafe.Sizeof(event.address), "source address"},
			{unsafe.Offsetof(event.missing), unsafe.Sizeof(event.missing), "bytes of the message that are missing"},
			{unsafe.Offsetof(event.text), unsafe.Sizeof(event.text), "text, to the first 0"},
		}},
		{"a request", []row{
			{unsafe.Offsetof(ask.lap), unsafe.Sizeof(ask.lap), "lap"},
			{unsafe.Offsetof(ask.length), unsafe.Sizeof(ask.length), "bytes of payload; bit 31: an answer is wanted"},
			{unsafe.Offsetof(ask.id), unsafe.Sizeof(ask.id), "id"},
			{unsafe.Offsetof(ask.tag), unsafe.Sizeof(ask.tag), "tag"},
			{unsafe.Offsetof(ask.words), unsafe.Sizeof(ask.words), "two words"},
			{unsafe.Offsetof(ask.hpu), unsafe.Sizeof(ask.hpu), "HPU"},
			{requestHeader, "payload", "payload"},
		}},
		{"a response", []row{
			{unsafe.Offsetof(reply.lap), unsafe.Sizeof(reply.lap), "lap"},
			{unsafe.Offsetof(reply.length), unsafe.Sizeof(reply.length), "bytes of payload"},
			{unsafe.Offsetof(reply.id), unsafe.Sizeof(reply.id), "id of the request"},
			{unsafe.Offsetof(reply.status), unsafe.Sizeof(reply.status), "status, signed"},
			{responseHeader, "payload", "payload"},
		}},
	} {
		// The rows of the next table, behind its two lines of heading.
		i := strings.Index(section, "|---|")
		if i < 0 {
			t.Fatalf("no table of %s", table.name)
		}
		_, section, _ = strings.Cut(section[i:], "\n")
		var rows []string
		for strings.HasPrefix(section, "|") {
			var line string
			line, section, _ = strings.Cut(section, "\n")
			rows = append(rows, line)
		}
		for i, r := range table.rows {
			want := fmt.Sprintf("| %v | %v | %s", r.offset, r.size, r.what)
			if i >= len(rows) || !strings.HasPrefix(rows[i], want) {
				t.Errorf("%s, row %d: want %q, in\n%s", table.name, i+1, want, strings.Join(rows, "\n"))
			}
		}
		if len(rows) != len(table.rows) {
			t.Errorf("%s has %d rows, want %d", table.name, len(rows), len(table.rows))
		}
	}
	if requestReply != 1<<31 {
		t.Error("the bit of a request is another one")
	}
}
