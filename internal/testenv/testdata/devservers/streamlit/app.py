import streamlit as st


def more():
    st.session_state.count += 1


if "count" not in st.session_state:
    st.session_state.count = 0
st.title("Served by Streamlit in a sandbox")
st.button("more", on_click=more)
st.write(f"Counted {st.session_state.count}")
sent = st.file_uploader("file")
if sent:
    st.write(f"Uploaded {len(sent.getvalue())} bytes")
