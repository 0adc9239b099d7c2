// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/spin"
)

// What becomes of a segment: words of `object check`, in the order of its summary.
const (
	segmentTaken   = "taken"
	segmentAgain   = "again"
	segmentIgnored = "ignored"
	segmentHanded  = "handed over"
	segmentFailed  = "failed"
)

var segmentWords = []string{segmentTaken, segmentAgain, segmentIgnored, segmentHanded, segmentFailed}

// ignoredFor says why handlers in eBPF never see a segment.
var ignoredFor = [spin.DropReasons]string{
	spin.DropMessages: "too many messages are open",
	spin.DropMemory:   "beyond the segments that a message may have",
	spin.DropNoHeader: "its message has not begun",
	spin.DropOverlap:  "overlaps others, or is not as long as its message's first",
	spin.DropTwoEnds:  "its message would have two ends",
	spin.DropBeyond:   "ends beyond 4 GiB",
	spin.DropDead:     "its message has failed",
}

// segmentFate says what became of a segment, by the counters before and after it, and why. No
// word: the frame has none.
func segmentFate(v *loader.HandlersVerdict, was, is *loader.MessageTally) (word, why string) {
	for r, n := range is.Dropped {
		if n != was.Dropped[r] {
			return segmentIgnored, ignoredFor[r]
		}
	}
	switch {
	case v.Failed != "":
		return segmentFailed, v.Detail
	case is.Handed != was.Handed:
		return segmentHanded, "its message goes to handlers in Go"
	case is.Stray != was.Stray:
		return segmentIgnored, "an acknowledgement"
	case is.Corrupt != was.Corrupt:
		return segmentIgnored, "its checksum is wrong"
	case is.Refused != was.Refused:
		return segmentIgnored, "there is no place for its message"
	case is.Busy != was.Busy || is.Leaked != was.Leaked:
		return segmentIgnored, "its message cannot take it now"
	case is.Duplicates != was.Duplicates || is.Waits != was.Waits:
		return segmentAgain, "was taken before"
	case !v.Ran && is.Headers == was.Headers:
		return "", ""
	case v.Code != spin.Success:
		return segmentTaken, v.Code.String()
	}
	return segmentTaken, ""
}

// what is what the table says of a segment behind its word.
func (v *objectVerdict) what() string {
	parts := []string{v.Why}
	switch {
	case v.Answered:
		parts = append(parts, "answered")
	case v.Mute:
		parts = append(parts, "no room for an answer")
	case v.Verdict == loader.ActionSend.String():
		parts = append(parts, "sent back")
	case v.Verdict == loader.ActionToStack.String():
		parts = append(parts, "to Linux")
	}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "; ")
}

// An openMessage is one that is open when the capture ends.
type openMessage struct {
	Number uint32 `json:"number"`
	Bytes  uint64 `json:"bytes"` // of its segments that were taken
}

// summary counts segments, and what is open.
func (r *objectReport) summary(w io.Writer) {
	counts := map[string]int{}
	var answered, sent, stack int
	for i := range r.Frames {
		switch v := &r.Frames[i]; {
		case v.Segment == "":
			counts[v.Verdict]++
			continue
		case v.Answered:
			answered++
		case v.Verdict == loader.ActionSend.String():
			sent++
		case v.Verdict == loader.ActionToStack.String():
			stack++
		}
		counts[r.Frames[i].Segment]++
	}
	fmt.Fprintf(w, "%s: ", count(len(r.Frames), "frame"))
	for _, word := range segmentWords {
		fmt.Fprintf(w, "%d %s, ", counts[word], word)
	}
	fmt.Fprintf(w, "%d malformed; %d answered", counts["malformed"], answered)
	if sent > 0 {
		fmt.Fprintf(w, ", %d sent back", sent)
	}
	if stack > 0 {
		fmt.Fprintf(w, ", %d to Linux", stack)
	}
	fmt.Fprintln(w)
	if len(r.Open) > 0 {
		var bytes uint64
		for _, m := range r.Open {
			bytes += m.Bytes
		}
		fmt.Fprintf(w, "%s open: %d bytes so far\n", count(len(r.Open), "message"), bytes)
	}
}
